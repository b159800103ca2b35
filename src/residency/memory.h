// Memory that copies run from and to.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorOptions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstddef>

#include "ebb/export.h"

namespace ebb {

// Ops in its scope are ours: below autograd, modes and interception.
c10::impl::ForceDispatchKeyGuard belowEverything();

// Uninitialised bytes from torch's allocator.
c10::Storage allocateBytes(size_t nbytes, const c10::TensorOptions& options);

// The first `nbytes` of a storage, as a tensor of bytes.
at::Tensor bytesIn(const c10::Storage& storage, size_t nbytes);

// Whether a CUDA graph is being captured on this thread's stream of `device`.
bool isCapturing(c10::Device device);

// Note [Pinned memory of exact sizes]
// torch's allocator of pinned memory rounds sizes up to powers of two on CUDA, which may double
// what a tensor takes. So where CUDA's runtime is loaded, ordinary memory of the exact size is
// registered with it. Its functions are looked up in the process: ebb is built without CUDA. See
// also Note [Memory near the device].
EBB_API c10::Storage allocatePinned(size_t nbytes, c10::Device device);

}  // namespace ebb
