// Which value each storage holds now.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "graph/value.h"

namespace ebb {

// A hash table from storages to values, by open addressing with linear probing. Each op looks up
// its arguments here and adds its results, so it is made for that: keys are compared in place, and
// the table is kept from region to region.
class ValueMap {
 public:
  struct Entry {
    c10::StorageImpl* storage = nullptr;  // null: free
    c10::intrusive_ptr<Value> value;
  };

  // The value of `storage`; null if it is not known.
  c10::intrusive_ptr<Value>* find(const c10::StorageImpl* storage);

  // The same; adds a null value if it is not known. Valid until the next call.
  c10::intrusive_ptr<Value>& operator[](c10::StorageImpl* storage);

  void erase(const c10::StorageImpl* storage);
  void clear();

  size_t size() const {
    return size_;
  }

  template <class F>
  void forEach(F&& f) {
    for (Entry& entry : entries_) {
      if (entry.storage != nullptr) {
        f(entry);
      }
    }
  }

 private:
  size_t home(const c10::StorageImpl* storage) const {
    return (reinterpret_cast<uintptr_t>(storage) >> 4) * 0x9E3779B97F4A7C15ULL >> shift_;
  }
  size_t next(size_t place) const {
    return (place + 1) & (entries_.size() - 1);
  }
  size_t placeOf(const c10::StorageImpl* storage) const;
  void resize(size_t capacity);

  std::vector<Entry> entries_;  // a power of two of them, at most half of them taken
  size_t size_ = 0;
  int shift_ = 0;  // 64 - log2(entries_.size())
};

}  // namespace ebb
