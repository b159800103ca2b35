#include "record/made_values.h"

#include <atomic>
#include <bit>

namespace ebb {
namespace {

constexpr size_t kSome = 4;

std::atomic<size_t> lookedAt{0};

}  // namespace

size_t valuesLookedAt() {
  return lookedAt.load(std::memory_order_relaxed);
}

// Note [When dead values are looked for]
// A value is dead if only the recorder's map refers to the value, and only ebb holds its storage.
// The map keeps such a value alive. Without gradients no handle needs a value, so every kept value
// would stay until the region ends. So ebb sweeps the map (finds and removes dead values) when its
// size has doubled, and whenever 16 MiB have been kept since the last sweep. On a GPU a single
// weight has that size, and a region may know ten thousand values, so the second kind of sweep
// examines only the latest values. Every second sweep examines twice as many as the sweep before,
// every fourth four times as many, and so on. Values mostly die young, and a value cannot be dead
// while its consumers live. So it is enough to examine the latest values, latest first. The cost
// per op is a few examined values, and grows with the logarithm of the map's size. If a value dies
// after k later values were made, a sweep finds it after at most k/2 more.
//
// After every eight values, a small sweep examines the latest sixteen. It removes only values whose
// storage is gone, and which no handle needs. The value's weak reference keeps the StorageImpl
// object of such a storage allocated. If ebb frees the object early, the next op reuses the
// object's memory, so recording touches less memory.
size_t MadeValues::nextWindow() {
  if (isFull()) {
    return size();
  }
  // `level` is the depth of this sweep. `window`: twice the number of values made since the last
  // sweep of this depth, and a few more.
  const auto level = std::min<size_t>(std::countr_zero(++sweeps_), madeAt_.size() - 1);
  const size_t inAll = forgotten_ + size();
  const size_t window = 2 * (inAll - madeAt_[level]) + (kSome << level);
  const bool all = window >= size();
  std::fill_n(madeAt_.begin(), all ? madeAt_.size() : level + 1, inAll);
  return all ? size() : window;
}

size_t MadeValues::forgetMarked(size_t window) {
  const bool full = isFull() && window == size();
  const auto first = entries_.end() - static_cast<std::ptrdiff_t>(window);
  const auto isMarked = [](const Entry& entry) { return entry.first == nullptr; };
  const auto end = std::remove_if(first, entries_.end(), isMarked);
  const auto left = static_cast<size_t>(end - first);
  entries_.erase(end, entries_.end());
  forgotten_ += window - left;
  if (full) {
    fullAt_ = std::max(kFewest, 2 * size());
  }
  lookedAt.fetch_add(window, std::memory_order_relaxed);
  return left;
}

void MadeValues::clear() {
  if (entries_.capacity() > 8 * (entries_.size() + kFewest)) {
    std::vector<Entry>().swap(entries_);
  }
  entries_.clear();
  fullAt_ = kFewest;
  forgotten_ = newFrom_ = sweeps_ = 0;
  madeAt_.fill(0);
}

}  // namespace ebb
