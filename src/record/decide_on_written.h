// What is decided on a state that an in-place op made.
#pragma once

#include "graph/value.h"
#include "policy/decider.h"

namespace ebb {

// `verdict` is the policy's on the op, `before` the state that it wrote over.
void decideOnWritten(Value& after, const Value& before, const Verdict& verdict);

}  // namespace ebb
