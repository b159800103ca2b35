#include "memory/bytes.h"

#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zero.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "torch_seams/key.h"

namespace ebb {

at::Tensor bytesOf(const c10::Storage& storage) { return bytesOf(storage, storage.nbytes()); }

at::Tensor bytesOf(const c10::Storage& storage, size_t nbytes) {
  constexpr auto kByte = c10::ScalarType::Byte;
  const auto key = c10::computeDispatchKey(kByte, c10::kStrided, storage.device());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(kByte));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(nbytes)});
  return tensor;
}

c10::Storage allocate(size_t nbytes, const c10::TensorOptions& options) {
  const auto below = belowEverything();
  return at::empty({static_cast<int64_t>(nbytes)}, options.dtype(c10::ScalarType::Byte)).storage();
}

c10::Storage allocateZeroed(size_t nbytes, c10::Device device) {
  c10::Storage storage = allocate(nbytes, device);
  const auto below = belowEverything();
  bytesOf(storage).zero_();
  return storage;
}

namespace {

void dropOwner(void* owner) { delete static_cast<c10::Storage*>(owner); }

}  // namespace

c10::DataPtr sharedPointer(c10::Storage owner, size_t offset) {
  auto held = std::make_unique<c10::Storage>(std::move(owner));
  char* memory = static_cast<char*>(held->mutable_data()) + offset;
  const c10::Device device = held->device();
  return {memory, held.release(), &dropOwner, device};
}

c10::Storage ownerOf(const c10::Storage& storage) {
  const c10::DataPtr& pointer = storage.data_ptr();
  return pointer.get_deleter() == &dropOwner
             ? ownerOf(*static_cast<c10::Storage*>(pointer.get_context()))
             : storage;
}

size_t misalignment(const c10::Storage& storage) {
  // CUDA's allocator aligns to 512 bytes, and cuBLAS looks at 256 of them.
  const size_t alignment = storage.device().is_cpu() ? 64 : 256;
  return reinterpret_cast<uintptr_t>(storage.data()) % alignment;
}

c10::Storage copyOf(const c10::Storage& storage) { return copyOf(storage, storage.nbytes()); }

c10::Storage copyOf(const c10::Storage& storage, size_t nbytes) {
  const auto below = belowEverything();
  const size_t shift = misalignment(storage);
  c10::Storage copy = allocate(nbytes + shift, storage.device());
  if (shift != 0) {
    copy = c10::Storage(
        c10::Storage::use_byte_size_t(), nbytes, sharedPointer(std::move(copy), shift));
  }
  bytesOf(copy).copy_(bytesOf(storage, nbytes));
  return copy;
}

}  // namespace ebb
