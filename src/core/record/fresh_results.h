// Distinguishes new results from results with other holders.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/ivalue.h>

#include "intercept/op_traits.h"

namespace ebb {

// True if only the call's results hold the memory of `tensor`, a result.
bool onlyResultsHold(const OpTraits& op, const c10::IValue* results, const at::Tensor& tensor);

}  // namespace ebb
