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
// also Note [Memory near the device], and for when the pool asks for a little more than the exact
// size Note [Classes of sizes].
//
// Registering takes long, a second for some gigabytes, most of it for pages that are given memory
// one after the other. So large ones are asked for, and several threads touch them first.
//
// Note [Pinned memory and fork]
// A fork copies pinned pages at once, or takes them from under the device at the next write, and a
// data loader forks. So its child gets none of them but zeros (MADV_WIPEONFORK). Nobody there can
// miss what was in them: they are copied to a device or to the disk tier, the device cannot be used
// in a child, and the disk tier refuses to read there what the parent wrote. The addresses stay
// mapped, unlike with MADV_DONTFORK, so that a child that drops a tensor, and with it such memory,
// does not unmap what it has got since at the same place.
EBB_API c10::Storage allocatePinned(size_t nbytes, c10::Device device);

}  // namespace ebb
