// Host memory that a device can copy from and to.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>

#include "ebb/export.h"

namespace ebb {

// Note [Pinned memory of exact sizes]
// On CUDA, torch's allocator of pinned memory rounds sizes up to powers of two, which may double
// the memory of a tensor. So if CUDA's runtime is loaded, ebb registers ordinary memory of the
// exact size. ebb is built without CUDA, and looks the functions up in the process. See also Note
// [Memory near the device], and Note [Classes of sizes] for the cases where slightly more is
// allocated.
//
// Registration takes long, a second for some gigabytes. Most of this time is page faults, one after
// the other. So ebb asks for huge pages, and several threads touch them first.
//
// Note [Pinned memory and fork]
// Data loaders fork. A fork either copies pinned pages at once, or the parent's next write moves
// the parent to a copy while the device still uses the old page. So a child process gets zeros in
// place of these pages (MADV_WIPEONFORK). The child never needs the contents. ebb copies them only
// to a device, which a child cannot use, or to the disk tier, which refuses to read the parent's
// data in a child. With MADV_DONTFORK instead, the addresses would not stay mapped in the child.
// The child could map new memory there, and would unmap it when it drops a tensor with pinned
// memory.
EBB_API c10::Storage allocatePinned(size_t nbytes, c10::Device device);

}  // namespace ebb
