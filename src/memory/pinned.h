// Host memory that a device can copy from and to.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>

#include "ebb/export.h"

namespace ebb {

// Note [Pinned memory of exact sizes]
// torch's allocator of pinned memory rounds sizes up to powers of two on CUDA, which may double
// what a tensor takes. So where CUDA's runtime is loaded, ordinary memory of the exact size is
// registered with it. Its functions are looked up in the process: ebb is built without CUDA. See
// also Note [Memory near the device].
EBB_API c10::Storage allocatePinned(size_t nbytes, c10::Device device);

}  // namespace ebb
