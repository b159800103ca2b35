// Sharing one memory between two storages, without a copy.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include <string>

#include "ebb/export.h"

namespace ebb {

// Note [Shared storages]
// dst's storage gets a pointer to the memory of src's storage, and a deleter that owns a reference
// to src's storage. So every view of dst, made before or after, shows src's data. src may die
// before dst: the memory is freed when both storages are gone. No version counter is incremented,
// because the new data is the data that dst is meant to have. dst points to the current memory of
// src's storage, so src's storage must keep this memory: it is not resizable from then on, and
// cannot be a dst itself.

// From now on `dst` and all tensors on its storage show the memory of `src`. Both must have the
// same dtype, device, sizes, strides and offset. src's storage must be at least as large as dst's
// storage, and must contain all elements that dst shows; only the second condition matters if dst's
// storage was emptied. dst's storage must be resizable. Otherwise throws c10::ValueError, and
// changes nothing.
EBB_API void shareStorage(const at::Tensor& dst, const at::Tensor& src);

// Frees the memory of `storage`, which must be resizable. Later reads raise an error with
// `message`.
void emptyStorage(const c10::Storage& storage, const std::string& message);

// Shares the memory of `from` with `storage`, which was emptied.
void fillStorage(const c10::Storage& storage, const c10::Storage& from);

}  // namespace ebb
