// Storages as bytes, whatever is in them. What is done to them here is ebb's own work: no autograd,
// mode or region sees it.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorOptions.h>

#include <cstddef>

#include "ebb/export.h"

namespace ebb {

// A storage, or its first `nbytes`, as a tensor of bytes.
EBB_API at::Tensor bytesOf(const c10::Storage& storage);
at::Tensor bytesOf(const c10::Storage& storage, size_t nbytes);

// A resizable storage of `nbytes` uninitialised bytes, from torch's allocator.
c10::Storage allocate(size_t nbytes, const c10::TensorOptions& options);

// The same, filled with zeros.
c10::Storage allocateZeroed(size_t nbytes, c10::Device device);

// A private copy of the bytes of `storage`, on the current stream; or of the first `nbytes`.
c10::Storage copyOf(const c10::Storage& storage);
c10::Storage copyOf(const c10::Storage& storage, size_t nbytes);

}  // namespace ebb
