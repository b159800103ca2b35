// Storages as bytes. All operations here are ebb's own work: autograd, modes and regions do not see
// them.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorOptions.h>

#include <cstddef>

#include "ebb/export.h"

namespace ebb {

// A storage, or the first `nbytes` of a storage, as a tensor of bytes.
EBB_API at::Tensor bytesOf(const c10::Storage& storage);
at::Tensor bytesOf(const c10::Storage& storage, size_t nbytes);

// A resizable storage of `nbytes` uninitialised bytes, from torch's allocator.
c10::Storage allocate(size_t nbytes, const c10::TensorOptions& options);

// Like allocate(), filled with zeros.
c10::Storage allocateZeroed(size_t nbytes, c10::Device device);

// A private copy of `storage`, or of the first `nbytes`, on the current stream.
c10::Storage copyOf(const c10::Storage& storage);
c10::Storage copyOf(const c10::Storage& storage, size_t nbytes);

}  // namespace ebb
