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

// Note [Memory of another storage]
// A storage can show the memory of another one, its owner: the storage's deleter then drops a
// reference to the owner. torch's device allocators know memory by the deleter, and ignore
// record_stream for a deleter that is not theirs. So ebb tells the allocator of uses through the
// owner.

// A pointer to the memory of `owner`, from byte `offset` on. Keeps `owner` alive.
c10::DataPtr sharedPointer(c10::Storage owner, size_t offset = 0);

// The storage that owns the memory of `storage`: itself, unless sharedPointer() made its pointer.
c10::Storage ownerOf(const c10::Storage& storage);

// Note [Alignment]
// Kernels look at the address of a tensor. On the CPU, vectorised kernels treat the elements before
// the first aligned address one by one, so their last bits depend on where memory starts. On a
// device, the address decides whether a kernel is vectorised, which random number an element gets,
// and which kernel cuBLAS chooses. torch's allocators align their memory; other memory (a
// mapped checkpoint, numpy, DLPack) may not be aligned. So a copy starts at the same distance from
// an aligned address as the original.

// The distance of the memory of `storage` from an aligned address, in bytes.
size_t misalignment(const c10::Storage& storage);

// A private copy of `storage`, or of the first `nbytes`, on the current stream.
c10::Storage copyOf(const c10::Storage& storage);
c10::Storage copyOf(const c10::Storage& storage, size_t nbytes);

}  // namespace ebb
