// In which order values came into the recorder's map, and how many of the latest a sweep looks at.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "ebb/export.h"
#include "graph/value.h"

namespace ebb {

// See Note [When dead values are looked for]
class MadeValues {
 public:
  // A storage, and the value that it got then. Compared, not owned.
  using Entry = std::pair<c10::StorageImpl*, const Value*>;

  void add(c10::StorageImpl* storage, const Value* value) {
    entries_.emplace_back(storage, value);
  }

  size_t size() const {
    return entries_.size();
  }

  // Whether it is time to look at all.
  bool isFull() const {
    return entries_.size() >= fullAt_;
  }

  // How many of the latest ones the next sweep looks at.
  size_t nextWindow();

  // Asks `isGone` for each of so many, the latest first, and forgets those for which it is true.
  // Gives how many are left of them.
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
  std::vector<Entry> entries_;       // some of them are gone
  size_t fullAt_ = kFewest;          // its size at which all of it is looked at
  size_t forgotten_ = 0;             // entries that were in it
  size_t sweeps_ = 0;                // so far, of a part of it
  std::array<size_t, 24> madeAt_{};  // by level: made in all, when a sweep last went so far
};

// How many values this process has looked at to find dead ones.
EBB_API size_t valuesLookedAt();

}  // namespace ebb
