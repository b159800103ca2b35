// The slice of a storage shown by one view. ebb offloads a small slice without the rest of the
// storage.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>

namespace ebb {

// Note [Saved slices]
// If a saved tensor shows less than half of a storage, ebb offloads only the tensor's elements. ebb
// gathers the elements on the device, offloads the copy, and later scatters the elements to their
// places in memory of the old size. So strides, offset and alignment stay the same. ebb fills the
// other bytes with 0xFF (a NaN in floating point): the program can reach them only through the
// storage.
class SavedSlice {
 public:
  // Null if `tensor` shows at least half of its storage, is empty, or shows an element at two
  // places.
  static std::unique_ptr<SavedSlice> ofSmall(const at::Tensor& tensor);

  // True if `tensor` shows the same elements in the same order.
  bool isOf(const at::Tensor& tensor) const;

  size_t nbytes() const;

  // The elements, contiguous, in a new storage.
  c10::Storage gather(const c10::Storage& storage) const;

  // A new storage of `nbytes` bytes with the elements at their places.
  c10::Storage scatter(const c10::Storage& gathered, size_t nbytes) const;

 private:
  explicit SavedSlice(const at::Tensor& tensor);
  bool hasDistinctElements() const;
  at::Tensor placesIn(const c10::Storage& storage) const;
  at::Tensor denseIn(const c10::Storage& gathered) const;

  c10::SmallVector<int64_t, 5> sizes_;    // without dimensions of stride 0 or of size 1
  c10::SmallVector<int64_t, 5> strides_;  // in elements
  int64_t offset_ = 0;                    // in elements
  size_t itemsize_ = 0;                   // bytes of an element
};

}  // namespace ebb
