#include "graph/geometry.h"

#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zero.h>
#include <c10/core/TensorOptions.h>

#include <algorithm>

#include "graph/kernel_state.h"

namespace ebb {
namespace {

// Kinds of tensor whose bytes are not a plain strided storage.
const c10::DispatchKeySet kUnrecordable{
    c10::DispatchKey::Python,
    c10::DispatchKey::Sparse,
    c10::DispatchKey::SparseCsr,
    c10::DispatchKey::NestedTensor,
    c10::DispatchKey::Quantized,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::Functionalize,
    c10::DispatchKey::ZeroTensor,
    c10::DispatchKey::MkldnnCPU,
};

// GeometryFlags::dimensions is one byte.
constexpr int64_t kMaxDimensions = 255;

// Named tensors were removed in torch 2.13.
template <class Impl>
bool isNamed(const Impl& impl) {
  if constexpr (requires { impl.named_tensor_meta(); }) {
    return impl.named_tensor_meta() != nullptr;
  }
  return false;
}

bool hasContiguousStrides(const c10::TensorImpl& impl) {
  const auto sizes = impl.sizes();
  const auto strides = impl.strides();
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != expected) {
      return false;
    }
    expected *= std::max<int64_t>(sizes[i], 1);
  }
  return true;
}

}  // namespace

bool isRecordable(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  return impl->dim() <= kMaxDimensions && !impl->key_set().has_any(kUnrecordable) &&
         impl->has_storage() && !isNamed(*impl) && !impl->has_symbolic_sizes_strides();
}

GeometryFlags geometryFlags(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  GeometryFlags flags;
  flags.dtype = tensor.scalar_type();
  flags.device = tensor.device();
  flags.dimensions = static_cast<uint8_t>(impl->dim());
  flags.contiguous = hasContiguousStrides(*impl);
  flags.conjugate = impl->is_conj();
  flags.negative = impl->is_neg();
  flags.wrappedNumber = impl->is_wrapped_number();
  return flags;
}

int64_t* writeShape(const at::Tensor& tensor, const GeometryFlags& flags, int64_t* shape) {
  const auto sizes = tensor.sizes();
  shape = std::copy(sizes.begin(), sizes.end(), shape);
  if (!flags.contiguous) {
    const auto strides = tensor.strides();
    shape = std::copy(strides.begin(), strides.end(), shape);
  }
  return shape;
}

at::Tensor viewOf(
    const c10::Storage& storage, const GeometryFlags& flags, const int64_t* shape, int64_t offset) {
  const auto key = c10::computeDispatchKey(flags.dtype, c10::kStrided, storage.device());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(flags.dtype));
  auto* impl = tensor.unsafeGetTensorImpl();
  const c10::IntArrayRef sizes(shape, flags.dimensions);
  if (flags.contiguous) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset);
  } else {
    impl->set_sizes_and_strides(sizes, {shape + flags.dimensions, flags.dimensions}, offset);
  }
  if (flags.conjugate) {
    impl->_set_conj(true);
  }
  if (flags.negative) {
    impl->_set_neg(true);
  }
  if (flags.wrappedNumber) {
    impl->set_wrapped_number(true);
  }
  if (flags.requiresGrad) {
    impl->set_requires_grad(true);
  }
  return tensor;
}

void Geometry::take(const at::Tensor& tensor) {
  flags_ = geometryFlags(tensor);
  offset_ = tensor.storage_offset();
  shape_.resize_for_overwrite(flags_.shapeCount());
  writeShape(tensor, flags_, shape_.data());
}

at::Tensor Geometry::viewOf(const c10::Storage& storage) const {
  return ebb::viewOf(storage, flags_, shape_.data(), offset_);
}

at::Tensor bytesOf(const c10::Storage& storage) {
  GeometryFlags flags;
  flags.dtype = c10::ScalarType::Byte;
  flags.dimensions = 1;
  const int64_t shape[2] = {static_cast<int64_t>(storage.nbytes()), 1};
  return viewOf(storage, flags, shape, 0);
}

c10::Storage allocate(size_t nbytes, c10::Device device) {
  KernelStateGuard plain(nullptr);
  const auto options = c10::TensorOptions(c10::ScalarType::Byte).device(device);
  return at::empty({static_cast<int64_t>(nbytes)}, options).storage();
}

c10::Storage allocateZeroed(size_t nbytes, c10::Device device) {
  KernelStateGuard plain(nullptr);
  c10::Storage storage = allocate(nbytes, device);
  bytesOf(storage).zero_();
  return storage;
}

c10::Storage copyOf(const c10::Storage& storage) {
  return copyOf(storage, storage.nbytes());
}

// Note [Alignment]
// Vectorised kernels treat the elements before the first aligned address one by one, so their last
// bits depend on where memory starts. torch's allocator aligns to 64 bytes; memory from elsewhere
// (a mapped checkpoint, numpy) need not be, and a copy of it starts just as far from such an
// address.
c10::Storage copyOf(const c10::Storage& storage, size_t nbytes) {
  KernelStateGuard plain(nullptr);
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
  bytesOf(copy).copy_(bytesOf(storage).narrow(0, 0, static_cast<int64_t>(nbytes)));
  return copy;
}

}  // namespace ebb
