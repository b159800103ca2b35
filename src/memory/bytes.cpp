#include "memory/bytes.h"

#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zero.h>

#include <utility>

#include "intercept/key.h"

namespace ebb {

at::Tensor bytesOf(const c10::Storage& storage) {
  return bytesOf(storage, storage.nbytes());
}

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

c10::Storage copyOf(const c10::Storage& storage) {
  return copyOf(storage, storage.nbytes());
}

// Note [Alignment]
// Vectorised kernels treat the elements before the first aligned address one by one, so their last
// bits depend on where memory starts. torch's allocator aligns to 64 bytes; other memory (a mapped
// checkpoint, numpy) may not be aligned. So a copy starts at the same distance from an aligned
// address as the original.
c10::Storage copyOf(const c10::Storage& storage, size_t nbytes) {
  const auto below = belowEverything();
  constexpr size_t kAlignment = 64;
  const size_t shift =
      storage.device().is_cpu() ? reinterpret_cast<uintptr_t>(storage.data()) % kAlignment : 0;
  c10::Storage copy = allocate(nbytes + shift, storage.device());
  if (shift != 0) {
    auto* whole = new c10::Storage(std::move(copy));
    c10::DataPtr shifted(
        static_cast<char*>(whole->mutable_data()) + shift,
        whole,
        [](void* owner) { delete static_cast<c10::Storage*>(owner); },
        storage.device());
    copy = c10::Storage(c10::Storage::use_byte_size_t(), nbytes, std::move(shifted));
  }
  bytesOf(copy).copy_(bytesOf(storage, nbytes));
  return copy;
}

}  // namespace ebb
