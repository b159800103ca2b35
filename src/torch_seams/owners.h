// Exact reference counts of tensors and storages. torch promises no numbers.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include <cstddef>

#include "ebb/export.h"

namespace ebb {

// True if `tensor` has no owners besides `known` references. The tensor's Python object, made by a
// kernel in Python, does not count unless Python code refers to the object.
bool hasNoOtherOwner(const at::TensorBase& tensor, size_t known);

// The number of weak references to `storage`. All strong references count as one.
EBB_API size_t weakReferences(const c10::Storage& storage);

}  // namespace ebb
