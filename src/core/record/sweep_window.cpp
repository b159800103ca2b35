#include "record/sweep_window.h"

#include <atomic>

namespace ebb {
namespace {

std::atomic<size_t> lookedAt{0};

}  // namespace

size_t valuesLookedAt() { return lookedAt.load(std::memory_order_relaxed); }

// Note [When dead values are looked for]
// A value is dead if only the recorder's map refers to the value, and only ebb holds its storage.
// The map keeps such a value alive. Without gradients no handle needs a value, so every kept value
// would stay until the region ends. So ebb sweeps the map (finds and removes dead values) when its
// size has doubled, and whenever 16 MiB have been kept since the last sweep. On a GPU a single
// weight has that size, and a region may know ten thousand values, so the second kind of sweep
// examines only the latest 48 values, and each 16th time the latest 768. Values mostly die young,
// and a value cannot be dead while its consumers live, so a sweep examines the latest value first.
//
// After every eight values, a small sweep examines the latest sixteen. It removes only values whose
// storage is gone, and which no handle needs. The value's weak reference keeps the StorageImpl
// object of such a storage allocated. If ebb frees the object early, the next op reuses the
// object's memory, so recording touches less memory.
size_t SweepWindow::forgetMarked(size_t window) {
  const bool full = isFull() && window == size();
  const auto first = entries_.end() - static_cast<std::ptrdiff_t>(window);
  const auto isMarked = [](const Entry& entry) { return entry.first == nullptr; };
  const auto end = std::remove_if(first, entries_.end(), isMarked);
  const auto left = static_cast<size_t>(end - first);
  entries_.erase(end, entries_.end());
  if (full) {
    fullAt_ = std::max(kFewest, 2 * size());
  }
  lookedAt.fetch_add(window, std::memory_order_relaxed);
  return left;
}

void SweepWindow::clear() {
  // A later region may be much shorter than the one that needed this memory.
  if (entries_.capacity() > 8 * (entries_.size() + kFewest)) {
    std::vector<Entry>().swap(entries_);
  }
  entries_.clear();
  fullAt_ = kFewest;
  new_ = sweeps_ = 0;
}

}  // namespace ebb
