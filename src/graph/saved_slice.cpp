#include "graph/saved_slice.h"

#include <ATen/ops/copy.h>
#include <ATen/ops/fill.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <utility>

#include "graph/geometry.h"
#include "intercept/key.h"
#include "memory/bytes.h"

namespace ebb {
namespace {

// A type of this size whose copies preserve every bit.
c10::ScalarType typeOfSize(size_t itemsize) {
  switch (itemsize) {
    case 2:
      return c10::ScalarType::Short;
    case 4:
      return c10::ScalarType::Int;
    case 8:
      return c10::ScalarType::Long;
    case 16:
      return c10::ScalarType::ComplexDouble;
    default:
      return c10::ScalarType::Byte;
  }
}

at::Tensor show(
    const c10::Storage& storage,
    size_t itemsize,
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    int64_t offset) {
  GeometryFlags flags;
  flags.dtype = typeOfSize(itemsize);
  flags.device = storage.device();
  flags.dimensions = static_cast<uint8_t>(sizes.size());
  c10::SmallVector<int64_t, 10> shape(sizes.begin(), sizes.end());
  shape.append(strides.begin(), strides.end());
  flags.offset = true;
  shape.push_back(offset);
  return viewOf(storage, flags, shape.data());
}

}  // namespace

SavedSlice::SavedSlice(const at::Tensor& tensor)
    : offset_(tensor.storage_offset()), itemsize_(tensor.itemsize()) {
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.stride(i) != 0 && tensor.size(i) != 1) {
      sizes_.push_back(tensor.size(i));
      strides_.push_back(tensor.stride(i));
    }
  }
}

std::unique_ptr<SavedSlice> SavedSlice::ofSmall(const at::Tensor& tensor) {
  const size_t itemsize = tensor.itemsize();
  const bool copyable = itemsize > 0 && itemsize <= 16 && (itemsize & (itemsize - 1)) == 0;
  if (tensor.numel() == 0 || !copyable) {
    return nullptr;
  }
  std::unique_ptr<SavedSlice> slice(new SavedSlice(tensor));
  const bool small = 2 * slice->nbytes() < tensor.storage().nbytes();
  return small && slice->hasDistinctElements() ? std::move(slice) : nullptr;
}

// True if each stride exceeds the range that all smaller strides reach together. Then no two
// elements share memory. False for some slices with distinct elements.
bool SavedSlice::hasDistinctElements() const {
  c10::SmallVector<size_t, 5> smallestFirst(sizes_.size());
  std::iota(smallestFirst.begin(), smallestFirst.end(), 0);
  std::sort(smallestFirst.begin(), smallestFirst.end(), [&](size_t a, size_t b) {
    return std::abs(strides_[a]) < std::abs(strides_[b]);
  });
  int64_t reached = 0;
  for (const size_t i : smallestFirst) {
    if (std::abs(strides_[i]) <= reached) {
      return false;
    }
    reached += std::abs(strides_[i]) * (sizes_[i] - 1);
  }
  return true;
}

bool SavedSlice::isOf(const at::Tensor& tensor) const {
  const SavedSlice other(tensor);
  return itemsize_ == other.itemsize_ && offset_ == other.offset_ && sizes_ == other.sizes_ &&
         strides_ == other.strides_;
}

size_t SavedSlice::nbytes() const {
  return std::accumulate(sizes_.begin(), sizes_.end(), itemsize_, std::multiplies<>());
}

at::Tensor SavedSlice::placesIn(const c10::Storage& storage) const {
  return show(storage, itemsize_, sizes_, strides_, offset_);
}

at::Tensor SavedSlice::denseIn(const c10::Storage& gathered) const {
  c10::SmallVector<int64_t, 5> strides(sizes_.size());
  int64_t next = 1;
  for (size_t i = sizes_.size(); i-- > 0;) {
    strides[i] = next;
    next *= sizes_[i];
  }
  return show(gathered, itemsize_, sizes_, strides, 0);
}

c10::Storage SavedSlice::gather(const c10::Storage& storage) const {
  const auto below = belowEverything();
  c10::Storage gathered = allocate(nbytes(), storage.device());
  denseIn(gathered).copy_(placesIn(storage));
  return gathered;
}

c10::Storage SavedSlice::scatter(const c10::Storage& gathered, size_t nbytes) const {
  const auto below = belowEverything();
  c10::Storage storage = allocate(nbytes, gathered.device());
  bytesOf(storage).fill_(0xFF);
  placesIn(storage).copy_(denseIn(gathered));
  return storage;
}

}  // namespace ebb
