// Exact reference counts of tensors and storages. torch promises no numbers.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include <cstddef>

namespace ebb {

// True if `tensor` has no owners besides `known` references. The tensor's Python object, made by a
// kernel in Python, does not count unless Python code refers to the object.
inline bool hasNoOtherOwner(const at::TensorBase& tensor, size_t known) {
  const size_t owners = tensor.use_count();
  return owners == known || (owners == known + 1 &&
                             tensor.unsafeGetTensorImpl()->pyobj_slot()->has_unique_reference());
}

// The number of weak references to `storage`. All strong references count as one.
inline size_t weakReferences(const c10::Storage& storage) {
  return storage.getWeakStorageImpl().weak_use_count() - 1;  // without this call's own
}

}  // namespace ebb
