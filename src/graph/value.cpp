#include "graph/value.h"

#include <ATen/core/TensorBody.h>

#include <algorithm>
#include <cstring>

#include "graph/recipe.h"
#include "graph/witness.h"

namespace ebb {

Value::Value() = default;
Value::~Value() = default;

void Value::stamp(const at::Tensor& tensor) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  home = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
  nbytes = storage->nbytes();
  address = storage->data();
  if (!tensor.is_inference()) {
    counter = tensor.unsafeGetTensorImpl()->version_counter();
    version = counter.current_version();
  }
}

[[gnu::noinline]] void Value::inheritCounters(const Value& before) {
  const bool sameWriter = sameCounter(counter, before.counter);
  if (sameWriter && before.otherCounters == nullptr) {
    return;
  }
  auto stamps = std::make_unique<std::vector<CounterStamp>>();
  if (before.otherCounters != nullptr) {
    for (const CounterStamp& stamp : *before.otherCounters) {
      if (!sameCounter(stamp.counter, counter)) {
        stamps->push_back(stamp);
      }
    }
  }
  if (!sameWriter && before.counter.enabled()) {
    stamps->push_back({before.counter, before.version});
  }
  if (!stamps->empty()) {
    otherCounters = std::move(stamps);
  }
}

bool Value::otherVersionsHold() const {
  return std::all_of(otherCounters->begin(), otherCounters->end(), [](const CounterStamp& stamp) {
    return stamp.counter.current_version() == stamp.version;
  });
}

[[gnu::noinline]] void Value::learn(const c10::VariableVersion& seen) {
  if (otherCounters == nullptr) {
    otherCounters = std::make_unique<std::vector<CounterStamp>>();
  }
  otherCounters->push_back({seen, seen.current_version()});
}

bool Value::knows(const c10::VariableVersion& seen) const {
  return sameCounter(seen, counter) ||
         (otherCounters != nullptr &&
          std::any_of(otherCounters->begin(), otherCounters->end(), [&](const CounterStamp& stamp) {
            return sameCounter(seen, stamp.counter);
          }));
}

c10::Storage Value::available() const {
  if (bytes && (isPrivate || (versionHolds() && !superseded && bytes.nbytes() == nbytes))) {
    return bytes;
  }
  return !versionHolds() || (witness && recipe) ? c10::Storage() : living();
}

c10::Storage Value::living() const {
  auto storage = superseded ? nullptr : home.lock();
  // Somebody may have emptied the storage to save memory, or even given it other memory since; then
  // it is the recipe's turn.
  const bool whole = storage && storage->nbytes() == nbytes && storage->data() == address;
  return whole ? c10::Storage(std::move(storage)) : c10::Storage();
}

void Value::release_resources() {
  recipe.reset();
  bytes = c10::Storage();
  redefined = c10::Storage();
  home.reset();
  counter = c10::VariableVersion();
  otherCounters.reset();
  witness.reset();
}

size_t readers(const c10::intrusive_ptr<Value>& value) {
  return value.use_count() - value->handles.load(std::memory_order_acquire);
}

bool sameCounter(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  // VariableVersion is one intrusive_ptr; equal pointers are equal counters.
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));
  return std::memcmp(static_cast<const void*>(&a), static_cast<const void*>(&b), sizeof(void*)) ==
         0;
}

}  // namespace ebb
