// A view's geometry: all that is needed, beside a storage, to make the tensor again.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace ebb {

// Whether a tensor is one that ebb can rebuild from a storage and a geometry: dense, strided, with
// a storage of its own device, of no Python subclass with a dispatch of its own, and unnamed.
// Everything else is not recorded, so it is a leaf.
bool isRecordable(const at::Tensor& tensor);

// The storage of a recordable tensor: without the check that others need.
inline c10::StorageImpl* storageOf(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// What its version counter shows; 0 for an inference tensor, which has none.
uint32_t versionOf(const at::Tensor& tensor);

// Whether it shows all of its storage, each byte once.
bool coversStorage(const at::Tensor& tensor);

// From its first element to its last, in bytes.
size_t bytesShown(const at::Tensor& tensor);

// The parts of a geometry that have one size.
struct GeometryFlags {
  c10::ScalarType dtype = c10::ScalarType::Float;  // element type
  c10::Device device = c10::kCPU;                  // where the storage lives
  uint8_t dimensions = 0;                          // tensors of more are not recordable
  bool contiguous : 1 = false;     // has the strides that its sizes give, to the last
  bool conjugate : 1 = false;      // lazily conjugated
  bool negative : 1 = false;       // lazily negated
  bool wrappedNumber : 1 = false;  // came from a Python number: ranks lower in type promotion
  bool requiresGrad : 1 = false;   // only kept for ops that read it

  // How many numbers tell the shape: the sizes, then the strides unless they follow from them.
  uint32_t shapeCount() const {
    return contiguous ? dimensions : 2 * dimensions;
  }
};

GeometryFlags geometryFlags(const at::Tensor& tensor);

// Writes flags.shapeCount() numbers; gives where the next ones go.
int64_t* writeShape(const at::Tensor& tensor, const GeometryFlags& flags, int64_t* shape);

// A fresh tensor, unknown to autograd, that shows `storage` with this geometry; `shape` as written
// by writeShape.
at::Tensor viewOf(
    const c10::Storage& storage, const GeometryFlags& flags, const int64_t* shape, int64_t offset);

// A geometry that owns its sizes and strides; used by handles.
class Geometry {
 public:
  Geometry() = default;
  void take(const at::Tensor& tensor);

  at::Tensor viewOf(const c10::Storage& storage) const;

  c10::IntArrayRef sizes() const {
    return {shape_.data(), flags_.dimensions};
  }
  c10::ScalarType dtype() const {
    return flags_.dtype;
  }
  c10::Device device() const {
    return flags_.device;
  }

 private:
  GeometryFlags flags_;
  int64_t offset_ = 0;                  // in elements
  c10::SmallVector<int64_t, 6> shape_;  // as written by writeShape
};

}  // namespace ebb
