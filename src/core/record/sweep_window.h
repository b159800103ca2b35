// The order in which values entered the recorder's map, and how many recent ones a sweep examines.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "ebb/export.h"
#include "graph/value.h"

namespace ebb {

// See Note [When dead values are looked for]
class SweepWindow {
 public:
  // A storage, and its value when the entry was added. The pointers are only compared.
  using Entry = std::pair<c10::StorageImpl*, const Value*>;

  void add(c10::StorageImpl* storage, const Value* value) {
    entries_.emplace_back(storage, value);
    ++new_;
  }

  size_t size() const { return entries_.size(); }

  // True if it is time to examine all values.
  bool isFull() const { return entries_.size() >= fullAt_; }

  // True if it is time to examine the newest values.
  bool hasNew() const { return new_ >= kNew; }
  // How many newest values to examine now. From here on, hasNew() counts anew.
  size_t newWindow() {
    new_ = 0;
    return std::min(size(), 2 * kNew);
  }

  // How many recent values the next sweep examines.
  size_t nextWindow() {
    const size_t latest = ++sweeps_ % kMany == 0 ? kMany * kLatest : kLatest;
    return isFull() ? size() : std::min(size(), latest);
  }

  // Calls `isGone` for each of the last `window` entries, latest first, and removes the entries for
  // which the result is true. Returns how many of the `window` entries remain.
  template <class F>
  size_t sweep(size_t window, F&& isGone) {
    const auto first = entries_.end() - static_cast<std::ptrdiff_t>(window);
    for (auto entry = entries_.end(); entry != first;) {
      --entry;
      entry->first = isGone(*entry) ? nullptr : entry->first;
    }
    return forgetMarked(window);
  }

  c10::ArrayRef<Entry> latest(size_t count) const {
    return {entries_.data() + entries_.size() - count, count};
  }

  void clear();

 private:
  size_t forgetMarked(size_t window);

  static constexpr size_t kFewest = 512;
  static constexpr size_t kNew = 8;
  static constexpr size_t kLatest = 48;
  static constexpr size_t kMany = 16;
  // Some values are no longer in the map. A null storage marks an entry that sweep() removes.
  std::vector<Entry> entries_;
  size_t fullAt_ = kFewest;  // size at which all entries are examined
  size_t new_ = 0;           // number of entries added since the last newWindow()
  size_t sweeps_ = 0;        // number of calls of nextWindow()
};

// How many values the sweeps of this process have examined.
EBB_API size_t valuesLookedAt();

}  // namespace ebb
