// Whether a result is new, or something that others hold too.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/ivalue.h>

#include "intercept/op_traits.h"

namespace ebb {

// Whether nobody but the call's results holds the memory of `tensor`, which is one of them.
bool onlyResultsHold(const OpTraits& op, const c10::IValue* results, const at::Tensor& tensor);

}  // namespace ebb
