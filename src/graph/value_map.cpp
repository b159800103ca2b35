#include "graph/value_map.h"

#include <algorithm>
#include <bit>
#include <utility>

namespace ebb {
namespace {

constexpr size_t kLeast = 64;

}  // namespace

// Where `storage` is, or where it would be put.
size_t ValueMap::placeOf(const c10::StorageImpl* storage) const {
  size_t place = home(storage);
  while (entries_[place].storage != nullptr && entries_[place].storage != storage) {
    place = next(place);
  }
  return place;
}

c10::intrusive_ptr<Value>* ValueMap::find(const c10::StorageImpl* storage) {
  if (size_ == 0) {
    return nullptr;
  }
  Entry& entry = entries_[placeOf(storage)];
  return entry.storage != nullptr ? &entry.value : nullptr;
}

c10::intrusive_ptr<Value>& ValueMap::operator[](c10::StorageImpl* storage) {
  if (2 * (size_ + 1) > entries_.size()) {
    resize(std::max(kLeast, 2 * entries_.size()));
  }
  Entry& entry = entries_[placeOf(storage)];
  if (entry.storage == nullptr) {
    entry.storage = storage;
    ++size_;
  }
  return entry.value;
}

void ValueMap::erase(const c10::StorageImpl* storage) {
  if (size_ == 0) {
    return;
  }
  size_t hole = placeOf(storage);
  if (entries_[hole].storage == nullptr) {
    return;
  }
  const c10::intrusive_ptr<Value> last = std::move(entries_[hole].value);  // dies when all is done
  // Whatever follows without a gap and belongs at the hole or before moves up.
  for (size_t place = next(hole); entries_[place].storage != nullptr; place = next(place)) {
    const size_t mask = entries_.size() - 1;
    const size_t distance = (place - home(entries_[place].storage)) & mask;
    if (distance >= ((place - hole) & mask)) {
      entries_[hole] = std::move(entries_[place]);
      hole = place;
    }
  }
  entries_[hole] = {};
  --size_;
}

// Regions come again and again, so the table stays unless it is much too large for this one.
void ValueMap::clear() {
  if (entries_.size() > kLeast && entries_.size() > 8 * size_) {
    entries_.clear();
    entries_.shrink_to_fit();
  } else {
    forEach([](Entry& entry) { entry = {}; });
  }
  size_ = 0;
}

void ValueMap::resize(size_t capacity) {
  std::vector<Entry> old(capacity);
  old.swap(entries_);
  shift_ = 64 - std::countr_zero(capacity);
  for (Entry& entry : old) {
    if (entry.storage != nullptr) {
      entries_[placeOf(entry.storage)] = std::move(entry);
    }
  }
}

}  // namespace ebb
