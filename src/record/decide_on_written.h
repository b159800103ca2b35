// The decision on the result of an in-place op.
#pragma once

#include "graph/value.h"
#include "policy/decider.h"

namespace ebb {

// `verdict` is the policy's verdict on the op, `before` the state before the write.
void decideOnWritten(Value& after, const Value& before, const Verdict& verdict);

}  // namespace ebb
