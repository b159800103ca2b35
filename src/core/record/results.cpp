#include "record/results.h"

#include <algorithm>
#include <utility>

#include "graph/geometry.h"
#include "hooks/store.h"
#include "record/arguments.h"
#include "record/value_map.h"

namespace ebb {
namespace {

// True if the program has emptied the storage of a leaf that recipes read.
bool isEmptied(const Value& value) {
  const c10::Storage& bytes = value.home().bytes();
  return !value.recipe() && bytes && !value.home().isPrivate() &&
         bytes.nbytes() != value.home().nbytes();
}

// True if recipes of `graph` need a copy of the bytes of `value` before a write. A value with bytes
// and a recipe is recomputed instead, unless all ranks must replay the same
// recipes.
bool needsCopy(const Graph& graph, const Value& value) {
  const bool isHeld = value.state() == ValueState::Held ||
                      (value.state() == ValueState::Both && graph.rules.sameOnAllRanks);
  return isHeld && value.uses().readers() > 0 && !value.home().isPrivate() && value.available();
}

// The storage of `value` is about to be written. `value` belongs to `graph`, which is not the open
// one. Like ValueMap::prepareForWrite() and ValueMap::applyDeferred(), but handles show the written
// storage even if torch counts the write: then the handle's version check raises first.
void supersedeEarlier(
    const Context& context, Graph& graph, Value& value, const c10::Storage& storage) {
  if (value.home().storage()._unsafe_get_target() != storage.unsafeGetStorageImpl()) {
    return;  // the value has another storage by now
  }
  const bool copies =
      needsCopy(graph, value) && value.home().hasMemoryOf(*storage.unsafeGetStorageImpl());
  graph.observers.tell(&OpEvents::stateEnds, value, true);
  value.showInstead(storage);
  value.overwritten();  // before the copy, which may fail: a replay then raises
  if (copies) {
    makePrivate(graph, value, *context.counters);
  } else if (value.recipe() && !value.home().isPrivate()) {
    value.release();
  }
}

}  // namespace

void Results::add(const Value& value, const c10::intrusive_ptr<Graph>& graph) {
  if (all_.size() >= sweepAt_) {
    for (auto entry = all_.begin();
         entry != all_.end();) {  // dead: only this map holds the counter
      entry = entry->second.counter.unique() ? all_.erase(entry) : std::next(entry);
    }
    sweepAt_ = 2 * all_.size() + 64;
  }
  value.versions().forEach([&](const VersionStamp& stamp) {
    if (stamp.counter.enabled()) {
      all_.insert_or_assign(identityOf(stamp.counter), Made{stamp.counter, WeakGraph(graph)});
    }
  });
}

const WeakGraph* Results::madeBy(const at::Tensor& tensor) const {
  const auto found = all_.find(identityOf(tensor.unsafeGetTensorImpl()->version_counter()));
  return found == all_.end() ? nullptr : &found->second.by;
}

// Note [Results that are written later]
// A result of one region is a leaf of a later region that reads the result, and the program owns
// the bytes. If a third region writes to the result, eager raises only if autograd has saved the
// result; a replay would need the old contents. So before the write, ebb copies the bytes for each
// graph whose recipes still read the bytes, as in Note [Copy on write]. ebb does not recompute the
// result in the graph that made it: the graph's recipes and all their inputs would have to stay
// alive in case of such a write. ebb copies only results of regions. A storage from outside may be
// a parameter emptied and gathered again by FSDP, so the bytes at the time of the write may differ
// from the bytes read by the recipe. ebb does not see writes outside of regions and writes of other
// threads; the replay then raises.
//
// Note [Writes in a later part]
// Each part of a region that was split has its own graph, but the program has written one region.
// So until the region ends, a write in a later part has the same effect on the values of earlier
// parts as on the values of its own part. Recipes of earlier parts read a copy of a leaf, or
// recompute a value that has a recipe. Handles show the written storage: see Note [Silent writes].
// ebb copies no leaf that the program has emptied since the part read the leaf: FSDP gathers such a
// parameter again, and restores its contents before backward.
void EarlierNeeds::add(
    const c10::intrusive_ptr<Value>& value, const c10::intrusive_ptr<Graph>& graph) {
  const c10::StorageImpl* storage = value->home().storage()._unsafe_get_target();
  const bool isUsed = value->uses().readers() > 0 || value->uses().handles() > 0;
  if (storage == nullptr || !isUsed || isEmptied(*value)) {
    return;
  }
  const auto isDead = [](const Needed& needed) { return needed.value.expired(); };
  if (all_.size() >= sweepAt_) {
    for (auto entry = all_.begin(); entry != all_.end();) {
      const bool isOver = std::ranges::all_of(entry->second, isDead);
      entry = isOver ? all_.erase(entry) : std::next(entry);
    }
    sweepAt_ = 2 * all_.size() + 64;
  }
  auto& ofStorage = all_[storage];
  ofStorage.erase(std::remove_if(ofStorage.begin(), ofStorage.end(), isDead), ofStorage.end());
  ofStorage.push_back({c10::weak_intrusive_ptr<Value>(value), WeakGraph(graph)});
}

void EarlierNeeds::storageEmptied(const c10::StorageImpl* storage) {
  const auto found = all_.find(storage);
  if (found == all_.end()) {
    return;
  }
  const auto willBeRestored = [](const Needed& needed) {
    const auto graph = needed.graph.lock();
    const auto value = needed.value.lock();
    if (!graph || !value) {
      return true;
    }
    std::lock_guard<PythonMutex> lock(graph->mutex);
    return !value->recipe() && !value->stash() && !value->home().isPrivate();
  };
  auto& all = found->second;
  all.erase(std::remove_if(all.begin(), all.end(), willBeRestored), all.end());
}

[[gnu::cold]] void EarlierNeeds::beforeWrite(const at::Tensor& tensor, const Context& context) {
  if (!isRecordable(tensor)) {
    for (const at::Tensor& part : partsInside(tensor)) {
      beforeWrite(part, context);
    }
    return;
  }
  const auto found = all_.find(storageOf(tensor));
  if (found == all_.end()) {
    return;
  }
  for (const Needed& needed : found->second) {
    const auto graph = needed.graph.lock();
    const auto value = needed.value.lock();
    if (graph && value) {
      std::lock_guard<PythonMutex> lock(graph->mutex);
      supersedeEarlier(context, *graph, *value, tensor.storage());
    }
  }
  all_.erase(found);
}

}  // namespace ebb
