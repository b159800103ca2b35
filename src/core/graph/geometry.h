// A view's geometry: with a storage, all that is needed to rebuild the tensor.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>

#include "memory/arena.h"

namespace ebb {

// True if ebb can rebuild `tensor` from a storage and a geometry. Such a tensor is strided and
// unnamed, and has a storage and concrete sizes. The tensor is not quantised, not a functorch
// wrapper and not a Python subclass with __torch_dispatch__. ebb does not record other tensors.
bool isRecordable(const at::Tensor& tensor);

// The storage of a recordable tensor, without the check that other tensors need.
inline c10::StorageImpl* storageOf(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// The tensor's current version; 0 for an inference tensor, which has no counter.
uint32_t versionOf(const at::Tensor& tensor);

// True if `tensor` shows all of its storage, each byte once.
bool coversStorage(const at::Tensor& tensor);

// Bytes from the tensor's first element to its last.
size_t bytesShown(const at::Tensor& tensor);

// The parts of a geometry with a fixed size.
struct GeometryFlags {
  c10::ScalarType dtype = c10::ScalarType::Float;  // element type
  c10::Device device = c10::kCPU;                  // where the storage lives
  uint8_t dimensions = 0;          // tensors with more dimensions are not recordable
  bool contiguous : 1 = false;     // the strides follow from the sizes
  bool offset : 1 = false;         // the first element is not the storage's first
  bool conjugate : 1 = false;      // lazily conjugated
  bool negative : 1 = false;       // lazily negated
  bool wrappedNumber : 1 = false;  // created from a Python number: ranks lower in type promotion
  bool requiresGrad : 1 = false;   // kept only for ops that read the flag

  // How many numbers describe the shape: the sizes, then the strides unless they follow from the
  // sizes, then the offset in elements unless it is 0.
  uint32_t shapeCount() const { return (contiguous ? dimensions : 2 * dimensions) + offset; }
};

GeometryFlags geometryFlags(const at::Tensor& tensor);

// Writes flags.shapeCount() numbers. Returns the position after the last number.
int64_t* writeShape(const at::Tensor& tensor, const GeometryFlags& flags, int64_t* shape);

// A new tensor, unknown to autograd, that shows `storage` with this geometry. writeShape wrote
// `shape`.
at::Tensor viewOf(const c10::Storage& storage, const GeometryFlags& flags, const int64_t* shape);

// A geometry that owns its shape; used by handles.
class Geometry {
 public:
  Geometry() = default;
  Geometry(const Geometry& other);
  Geometry(Geometry&&) noexcept = default;
  Geometry& operator=(Geometry&&) noexcept = default;

  void take(const at::Tensor& tensor);

  at::Tensor viewOf(const c10::Storage& storage) const;

  c10::IntArrayRef sizes() const { return {shape_.get(), flags_.dimensions}; }
  c10::ScalarType dtype() const { return flags_.dtype; }
  c10::Device device() const { return flags_.device; }

 private:
  struct Free {
    void operator()(int64_t* shape) const noexcept { arenaFree(shape); }
  };
  using Shape = std::unique_ptr<int64_t[], Free>;
  Shape newShape() const;

  Shape shape_;  // the numbers from writeShape; null if there are none
  GeometryFlags flags_;
};

}  // namespace ebb
