// Collectives: their process group, and waiting for their communication.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <string>

#include "intercept/op_traits.h"

namespace ebb {

// The name of the process group of a call. `others` are the call's arguments that are not single
// tensors, as ArgumentTraits::others lists them.
std::string processGroupOf(const OpTraits& op, const c10::IValue* others);

// Waits until the communication of a call with these `results` is complete. On a GPU the current
// stream waits, elsewhere the thread. A second wait, such as the program's, does nothing. `group`
// is the name of the process group. Throws if another rank will not take part.
void waitForCollective(const c10::IValue* results, size_t count, const std::string& group);

}  // namespace ebb
