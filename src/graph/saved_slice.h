// The slice of a storage that one view shows, to be moved alone where it is small.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>

namespace ebb {

// Note [Saved slices]
// A saved tensor that shows less than half of its storage need not move the rest: its elements are
// gathered on the device, moved, and put back at their places in memory of the old size, so that
// strides, offset and alignment are what they were. What the tensor does not show is filled with
// 0xFF there (a NaN, in floating point): nobody can name it but through the storage.
class SavedSlice {
 public:
  // Null if `tensor` shows half of its storage or more, nothing, or an element at two places.
  static std::unique_ptr<SavedSlice> ofSmall(const at::Tensor& tensor);

  // Whether `tensor` shows the same elements in the same way.
  bool isOf(const at::Tensor& tensor) const;

  size_t nbytes() const;

  // The elements, one after the other, in memory of their own.
  c10::Storage gather(const c10::Storage& storage) const;

  // A storage of `nbytes` bytes with the elements at their places.
  c10::Storage scatter(const c10::Storage& gathered, size_t nbytes) const;

 private:
  explicit SavedSlice(const at::Tensor& tensor);
  bool hasDistinctElements() const;
  at::Tensor placesIn(const c10::Storage& storage) const;
  at::Tensor denseIn(const c10::Storage& gathered) const;

  c10::SmallVector<int64_t, 5> sizes_;    // without dimensions that repeat or have one element
  c10::SmallVector<int64_t, 5> strides_;  // in elements
  int64_t offset_ = 0;                    // in elements
  size_t itemsize_ = 0;                   // bytes of an element
};

}  // namespace ebb
