// What a tensor that is not recordable keeps its elements in.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/SmallVector.h>

namespace ebb {

using PartsInside = c10::SmallVector<at::Tensor, 3>;

// The dense tensors that a sparse or compressed tensor is made of; of one of another kind that has
// a storage, the storage's bytes. A write to the tensor may write to any of them.
PartsInside partsInside(const at::Tensor& tensor);

}  // namespace ebb
