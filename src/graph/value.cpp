#include "graph/value.h"

#include <ATen/core/TensorBody.h>

#include "graph/geometry.h"
#include "graph/recipe.h"
#include "graph/rows.h"
#include "graph/witness.h"
#include "kernel/fingerprint.h"
#include "memory/stash.h"

namespace ebb {

Value::Value() = default;

Value::~Value() {
  noteEnd();
}

void Value::decide(Decision verdict, bool policy) {
  decision = verdict;
  byPolicy = policy && !recomputes(verdict);
  due = verdict == Decision::Offload || verdict == Decision::Page;
}

void Value::stay() {
  decision = Decision::Save;
  due = false;
}

void Value::mustBeKept() {
  if (!isKept()) {
    decision = Decision::Save;
    byPolicy = false;
  }
}

void Value::undoDecision() {
  decision = recipe ? Decision::Recompute : Decision::Save;
  byPolicy = byPolicy && !recipe;
  due = false;
}

void Value::inherit(const Value& before) {
  rule = before.rule;
  decide(before.decision);
  due = before.isPaged() || before.due || before.stash;
}

void Value::send(c10::intrusive_ptr<Stash> away) {
  stash = std::move(away);
  bytes = c10::Storage();
  recipe.reset();
}

void Value::materialise(c10::Storage made, bool onlyOurs) {
  bytes = std::move(made);
  isPrivate = onlyOurs;
  stash.reset();
  recipe.reset();
}

void Value::materialiseInPassing(c10::Storage made) {
  bytes = std::move(made);
  isPrivate = true;
}

void Value::giveUpAgain() {
  bytes = c10::Storage();
  isPrivate = false;
}

void Value::stamp(const at::Tensor& tensor) {
  c10::StorageImpl* storage = storageOf(tensor);
  home = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
  nbytes = storage->nbytes();
  address = storage->data();
  if (!tensor.is_inference()) {
    written.counter = tensor.unsafeGetTensorImpl()->version_counter();
    written.version = written.counter.current_version();
  }
}

[[gnu::noinline]] void Value::inheritCounters(const Value& before) {
  if (!sameCounter(written.counter, before.written.counter)) {
    learn(before.written.counter, before.written.version);
  }
  for (const auto* stamp = before.otherCounters.get(); stamp; stamp = stamp->next.get()) {
    learn(stamp->counter, stamp->version);
  }
}

bool Value::otherVersionsHold() const {
  const CounterStamp* stamp = otherCounters.get();
  while (stamp != nullptr && stamp->holds()) {
    stamp = stamp->next.get();
  }
  return stamp == nullptr;
}

void Value::learn(const c10::VariableVersion& seen) {
  learn(seen, seen.enabled() ? seen.current_version() : 0);
}

[[gnu::noinline]] void Value::learn(const c10::VariableVersion& seen, uint32_t at) {
  if (!seen.enabled() || knows(seen)) {
    return;
  }
  auto stamp = std::make_unique<CounterStamp>();
  stamp->counter = seen;
  stamp->version = at;
  stamp->next = std::move(otherCounters);
  otherCounters = std::move(stamp);
}

void Value::allowOne(const c10::VariableVersion& seen) {
  const auto allow = [&](VersionStamp& stamp) {
    const auto& known = stamp.counter;
    stamp.version += sameCounter(known, seen) && known.current_version() == stamp.version + 1;
  };
  allow(written);
  for (CounterStamp* stamp = otherCounters.get(); stamp != nullptr; stamp = stamp->next.get()) {
    allow(*stamp);
  }
}

bool Value::knows(const c10::VariableVersion& seen) const {
  if (sameCounter(seen, written.counter)) {
    return true;
  }
  const CounterStamp* stamp = otherCounters.get();
  while (stamp != nullptr && !sameCounter(seen, stamp->counter)) {
    stamp = stamp->next.get();
  }
  return stamp != nullptr;
}

c10::Storage Value::available() const {
  if (bytes && (isPrivate || (versionHolds() && !superseded && bytes.nbytes() == nbytes))) {
    return bytes;
  }
  return !versionHolds() || (witness && recipe) ? c10::Storage() : living();
}

c10::Storage Value::living() const {
  auto storage = superseded ? nullptr : home.lock();
  // Other code may have emptied the storage to save memory, or given it other memory. Then the
  // recipe has to run.
  const bool whole = storage && storage->nbytes() == nbytes && storage->data() == address;
  return whole ? c10::Storage(std::move(storage)) : c10::Storage();
}

void Value::moveHome() {
  home = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim_copy(bytes.unsafeGetStorageImpl());
  address = bytes.data();
  superseded = false;
  bytes = c10::Storage();
}

void Value::release_resources() {
  noteEnd();
  recipe.reset();
  bytes = c10::Storage();
  redefined = c10::Storage();
  stash.reset();
  slice.reset();
  rows.reset();
  home.reset();
  written.counter = c10::VariableVersion();
  otherCounters.reset();
  witness.reset();
  entry.reset();
}

// See Note [What only ebb holds]. `address` does not match ebb's own copies.
void Value::noteEnd() {
  if (madeHere || !bytes || bytes.use_count() > 1 || bytes.data() != address) {
    return;
  }
  wasLast = true;
  noteLast(entry);
}

bool onlyHandlesOwn(const c10::intrusive_ptr<Value>& value) {
  return value.use_count() == value->handles.load(std::memory_order_acquire);
}

bool hasChanged(const Value& value, const c10::Storage& storage, VerifyMode mode) {
  const auto what = mode == VerifyMode::Off ? FingerprintOf::Samples : FingerprintOf::Everything;
  return value.fingerprint != 0 && fingerprint(storage, what) != value.fingerprint;
}

}  // namespace ebb
