// Distinguishes new results from results that other code holds too.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/ivalue.h>

#include "intercept/op_traits.h"

namespace ebb {

// True if only the call's results hold the memory of `tensor`, which is one of them.
bool onlyResultsHold(const OpTraits& op, const c10::IValue* results, const at::Tensor& tensor);

}  // namespace ebb
