// Two storages on one memory, without a copy.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include <string>

#include "ebb/export.h"

namespace ebb {

// Note [Shared storages]
// dst's storage gets a pointer to the memory of src's, and a deleter that owns a reference to it.
// So every view of dst, made before or after, shows src's data; src may die first; the memory goes
// with the last of both. No version moves: dst shows what it is supposed to show. Since dst shows
// the memory that src's storage has now, that storage may not get another one: it is not resizable
// from then on, and cannot be a dst itself.

// From now on `dst` and all tensors on its storage show the memory of `src`. Both must have the
// same dtype, device, sizes, strides and offset; src's storage must be as large as dst's was, or as
// what dst shows if dst's was emptied; dst's storage must be resizable. Throws c10::ValueError
// otherwise, and changes nothing.
EBB_API void shareStorage(const at::Tensor& dst, const at::Tensor& src);

// Gives up the memory of `storage`, which must be resizable; who reads it gets an error with
// `message`.
void emptyStorage(const c10::Storage& storage, const std::string& message);

// Ends that error.
void allowAccess(const c10::Storage& storage);

// Shares the memory of `from` with `storage`, which was emptied.
void fillStorage(const c10::Storage& storage, const c10::Storage& from);

}  // namespace ebb
