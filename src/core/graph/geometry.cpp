#include "graph/geometry.h"

#include <c10/core/TensorOptions.h>

#include <algorithm>

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

uint32_t versionOf(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

bool coversStorage(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const size_t nbytes = tensor.storage().nbytes();
  // An empty tensor covers its storage of 0 bytes: a kernel that gets the tensor as `out=` resizes
  // the storage and writes all bytes.
  return nbytes == static_cast<size_t>(impl->numel()) * impl->itemsize() &&
         (nbytes == 0 || impl->is_non_overlapping_and_dense());
}

size_t bytesShown(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  int64_t elements = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    elements += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return static_cast<size_t>(elements) * tensor.itemsize();
}

GeometryFlags geometryFlags(const at::Tensor& tensor) {
  const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  GeometryFlags flags;
  flags.dtype = tensor.scalar_type();
  flags.device = tensor.device();
  flags.dimensions = static_cast<uint8_t>(impl->dim());
  flags.contiguous = hasContiguousStrides(*impl);
  flags.offset = impl->storage_offset() != 0;
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
  if (flags.offset) {
    *shape++ = tensor.storage_offset();
  }
  return shape;
}

at::Tensor viewOf(const c10::Storage& storage, const GeometryFlags& flags, const int64_t* shape) {
  const auto key = c10::computeDispatchKey(flags.dtype, c10::kStrided, storage.device());
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(flags.dtype));
  auto* impl = tensor.unsafeGetTensorImpl();
  const c10::IntArrayRef sizes(shape, flags.dimensions);
  const int64_t offset = flags.offset ? shape[flags.shapeCount() - 1] : 0;
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

Geometry::Geometry(const Geometry& other) : flags_(other.flags_) {
  shape_ = newShape();
  std::copy_n(other.shape_.get(), flags_.shapeCount(), shape_.get());
}

Geometry::Shape Geometry::newShape() const {
  const size_t nbytes = flags_.shapeCount() * sizeof(int64_t);
  return Shape(nbytes == 0 ? nullptr : static_cast<int64_t*>(arenaAllocate(nbytes)));
}

void Geometry::take(const at::Tensor& tensor) {
  flags_ = geometryFlags(tensor);
  shape_ = newShape();
  writeShape(tensor, flags_, shape_.get());
}

at::Tensor Geometry::viewOf(const c10::Storage& storage) const {
  return ebb::viewOf(storage, flags_, shape_.get());
}

}  // namespace ebb
