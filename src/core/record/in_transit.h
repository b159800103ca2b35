// Tensors that a collective may still be writing when a later region reads them.
#pragma once

#include <ATen/core/TensorBody.h>

namespace ebb {

// A collective that nobody has waited for writes to `tensor`. ebb sees no wait, so from now on no
// store takes an input on the tensor's storage: a copy could miss data that has not arrived. See
// Note [Communication].
void noteInTransit(const at::Tensor& tensor);
bool mayBeInTransit(const at::Tensor& tensor);

}  // namespace ebb
