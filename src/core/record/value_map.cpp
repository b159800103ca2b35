#include "record/value_map.h"

#include <algorithm>
#include <utility>

#include "graph/recipe.h"
#include "hooks/process_state.h"
#include "hooks/store.h"
#include "memory/bytes.h"
#include "record/keeper.h"
#include "record/results.h"
#include "torch_seams/owners.h"

namespace ebb {
namespace {

// See Note [When dead values are looked for]
constexpr size_t kSweepBytes = size_t{16} << 20;

// The ops of leaves, for observers.
const std::string kFromOutside = "from outside";
const std::string kOpaque = "ebb.opaque";

// True if the storage is gone, and the end of the region has nothing to do for the value.
bool isDone(const c10::intrusive_ptr<Value>& value) {
  return value->home().storage().expired() && !value->home().bytes() && !value->stash() &&
         !value->waitsForEnd() && value->uses().handles() == 0;
}

// True if the value is done, or if only the map refers to the value and no other code holds the
// value's storage. Drops the recipe of a value that owns its bytes.
bool isUnused(const c10::intrusive_ptr<Value>& value) {
  const bool isOwned = value->ownsItsBytes();
  if (isOwned) {
    value->dropRecipe();
  }
  return isDone(value) || (value.unique() && (isOwned || value->home().storage().expired()));
}

}  // namespace

c10::Storage escapedStorage(const Value& value) {
  if (!value.recipe() || value.decision().isKept() || value.facts().opaque > 0 ||
      value.home().storage().expired() || !value.versions().areUnmoved() || value.isPartial()) {
    return {};
  }
  c10::Storage living = value.home().living();
  const size_t ours = value.uses().isPinned() ? 2 : 1;
  return living && living.use_count() > ours ? living : c10::Storage();
}

void moveVersionIfNeeded(const at::Tensor& tensor) {
  if (!isRecordable(tensor) || tensor.is_inference()) {
    return;
  }
  // Each value has a weak reference to its storage, and so has the table of storages in transit;
  // all strong references count as one more.
  const size_t notOfValues = isInTransit(tensor.storage()) ? 2 : 1;
  if (weakReferencesOfOthers(tensor.storage(), &weakReferences) > notOfValues) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void moveVersionOfComputed(const at::Tensor& tensor) {
  if (tensor.requires_grad() && !tensor.is_leaf()) {
    moveVersionIfNeeded(tensor);
  }
}

// If an unseen write came before the copy, the copy is useless, and a replay raises.
[[gnu::cold]] void makePrivate(Graph& graph, Value& value, RegionCounters& counters) {
  if (value.home().bytes().nbytes() < value.home().nbytes()) {
    return;  // freed by other code; a replay that needs the bytes will raise
  }
  graph.streams.use(value, value.home().bytes());
  c10::Storage copy = copyOf(value.home().bytes(), value.home().nbytes());
  const bool changed = hasChanged(value, copy, graph.rules.fingerprints());
  value.holdAlone(std::move(copy), changed);
  graph.streams.made(value, value.home().bytes());
  counters.bytesCopied += value.home().nbytes();
  graph.observers.tell(&OpEvents::copied, value);
}

void ValueMap::clear() {
  // The cost of clearing grows with the table, so one unusually long region would slow all later
  // ones.
  if (values_.bucket_count() > 8 * (values_.size() + 8)) {
    Map().swap(values_);
  }
  values_.clear();
  unsettled_.clear();
  made_.clear();
}

// An unseen write has changed the storage of `value`, which is `now`.
static void endUnseen(const Graph& graph, Value& value, const c10::Storage& now) {
  graph.observers.tell(&OpEvents::stateEnds, value, false);
  value.showInstead(now);
}

// Note [Version stamps]
// A value remembers the version counter of its last writer, and the version. An op may read the
// storage through a tensor whose version has moved without a visible write. Then code that ebb does
// not see has written (a compiled function, mark_dirty). So the new state is a leaf, and ebb never
// uses the stale recipe. The same holds if the program has resized the storage, or has given it
// other memory. When ebb records a write, the version has not moved yet: in-place ops move the
// version after their kernel has returned. At the next op, pack or region exit, ebb therefore adds
// one to the stamp, if torch counts the write: see Note [Which writes are counted]. A
// __torch_dispatch__ calls ops below ADInplaceOrView, so these calls move no version. Aliases may
// have counters of their own (`x.data`, the results of _unsafe_view and unsafe_chunk, parameters in
// one flat buffer). A value knows the counters of all tensors seen on its storage, and is valid
// only while no counter moves. If the storage came from outside, ebb accepts any new counter. If
// the storage was made inside the region, ebb accepts a new counter only at version 0, before any
// write.
c10::intrusive_ptr<Value>& ValueMap::current(const at::Tensor& tensor) {
  return current(values_[storageOf(tensor)], tensor);
}

c10::intrusive_ptr<Value>& ValueMap::current(
    c10::intrusive_ptr<Value>& slot, const at::Tensor& tensor) {
  if (slot && slot->isShownBy(tensor)) {
    return slot;
  }
  if (slot) {
    endUnseen(*context_.graph, *slot, tensor.storage());
  }
  slot = leafOf(tensor, slot);
  context_.graph->observers.tell(
      &OpEvents::made, Made{context_, *slot, tensor, kFromOutside, nullptr});
  return slot;
}

c10::intrusive_ptr<Value> ValueMap::leafOf(
    const at::Tensor& tensor, const c10::intrusive_ptr<Value>& before) {
  StateFacts facts;
  facts.isEarlierResult = before && before->facts().isEarlierResult;
  facts.opaque = before ? before->facts().opaque : 0;
  if (const WeakGraph* maker = before ? nullptr : context_.results->madeBy(tensor)) {
    facts.isEarlierResult = true;
    if (!maker->expired()) {
      context_.graph->observers.tell(&RegionEvents::readsResultOf, *maker);
    }
  }
  const bool isStored = keeper_.storesInput(tensor);
  const ValueDecision decision(isStored ? context_.decider->inputs() : Decision::Save, false);
  auto leaf = c10::make_intrusive<Value>(tensor, facts, decision.orKept());
  made_.add(storageOf(tensor), leaf.get());
  return leaf;
}

// Note [Copy on write]
// The storage of `value` is about to be written. If the value's bytes are kept there and recipes
// still need the bytes, ebb copies them first, so a replay sees the same contents as the forward. A
// value with a recipe is recomputed instead.
void ValueMap::prepareForWrite(const c10::intrusive_ptr<Value>& value, size_t indifferent) {
  context_.graph->observers.tell(&OpEvents::stateEnds, *value, true);
  value->overwritten();
  if (!value->home().bytes() || value->home().isPrivate()) {
    return;
  }
  const auto needed = [&] { return !value->recipe() && value->uses().readers() > indifferent; };
  if (needed()) {
    forget(made_.size(), isUnused);  // frees recipes that only the map keeps alive
  }
  if (needed()) {
    makePrivate(*context_.graph, *value, *context_.counters);
  } else {
    value->release();
  }
}

// Note [Silent writes]
// A write may leave the version counter as it is. In eager, the saved tensor shares its storage
// with the written tensor and no version check fails, so backward reads the written bytes. So after
// such a write, handles of the old value show the written storage (Value::showInstead), or follow
// the write: see Note [Handles that follow].
ValueMap& ValueMap::applyDeferred() {
  for (Unsettled& entry : unsettled_) {
    Value& after = *entry.after;
    if (entry.viewed.enabled()) {
      after.versions().allowOne(entry.viewed);
      continue;
    }
    const bool counted = entry.counted && !after.versions().areUnmoved();
    if (entry.movedFirst != nullptr && entry.counted && !counted) {
      entry.movedFirst->state.movesFirst.store(true, std::memory_order_relaxed);
    }
    if (counted) {
      after.versions().countWrite();
    }
    const bool shows =
        entry.before && (!counted || entry.before->uses().showsWrites() ||
                         !after.versions().isWriters(entry.before->versions().written().counter));
    if (shows && LatestState::handOn(*entry.before, entry.after)) {
      context_.graph->observers.tell(&OpEvents::handedOn, *entry.before, after);
    } else if (shows) {
      entry.before->showInstead(entry.storage);
    }
  }
  unsettled_.clear();
  return *this;
}

[[gnu::cold]] void ValueMap::storageGrew(
    const c10::intrusive_ptr<Value>& value, const c10::Storage& storage) {
  endUnseen(*context_.graph, *value, storage);
  if (value->home().bytes() && !value->home().isPrivate() && !value->recipe()) {
    makePrivate(*context_.graph, *value, *context_.counters);
  }
  values_.erase(storage.unsafeGetStorageImpl());
}

[[gnu::cold]] void ValueMap::replaceByLeaf(const at::Tensor& tensor, UnseenWrite write) {
  applyDeferred();
  const c10::intrusive_ptr<Value> before = current(tensor);
  prepareForWrite(before, 0);
  before->showInstead(tensor.storage());
  StateFacts facts = before->facts().afterWrite();
  facts.opaque += write == UnseenWrite::OpaqueBegins;
  facts.opaque -= write == UnseenWrite::OpaqueEnds && facts.opaque > 0;
  facts.inTransit = write == UnseenWrite::Collective;
  if (!facts.madeHere && write == UnseenWrite::OpaqueEnds) {
    moveVersionIfNeeded(tensor);
  } else if (!facts.madeHere && write == UnseenWrite::Collective) {
    moveVersionOfComputed(tensor);
  }
  auto leaf = c10::make_intrusive<Value>(
      tensor, facts, ValueDecision(Decision::Save, false), &before->versions());
  context_.graph->observers.tell(
      &OpEvents::made, Made{
                           context_, *leaf, tensor, kOpaque,
                           "written by code that torch does not see (ebb.opaque)"});
  put(storageOf(tensor), std::move(leaf));
}

// See Note [When dead values are looked for]
bool ValueMap::needsSweep() const {
  return made_.hasNew() || made_.isFull() || keeper_.keptBytes() >= kSweepBytes;
}

void ValueMap::sweep() {
  if (!made_.isFull() && keeper_.keptBytes() < kSweepBytes) {
    forget(made_.newWindow(), isDone);
    return;
  }
  const size_t left = forget(made_.nextWindow(), isUnused);
  keeper_.putNeeded(dueAndNeeded(left));
  keeper_.forgetBytes();
}

// Forgets the dead values among the last `window`, latest first, so consumers go before their
// inputs. Returns how many of the last `window` values are left.
size_t ValueMap::forget(size_t window, bool (*isDead)(const c10::intrusive_ptr<Value>&)) {
  return made_.sweep(window, [&](const SweepWindow::Entry& made) {
    const auto entry = values_.find(made.first);
    if (entry == values_.end() || entry->second.get() != made.second) {
      return true;  // the storage has another state now
    }
    if (!isDead(entry->second)) {
      return false;
    }
    entry->second->releaseGone();
    values_.erase(entry);
    return true;
  });
}

namespace {

bool isToLeave(const SweepWindow::Entry& entry) {
  return entry.second->decision().isDue() && entry.second->home().bytes();
}

// The values that the handles on `latest` need, directly or for a replay. Leaves out inputs of
// recipes up to `first`, the number of a recipe.
ska::flat_hash_set<const Value*> neededBy(
    c10::ArrayRef<SweepWindow::Entry> latest, uint64_t first) {
  ska::flat_hash_set<const Value*> needed;
  std::vector<const Value*> next;
  const auto need = [&](const Value* value) {
    if (value != nullptr && needed.insert(value).second) {
      next.push_back(value);
    }
  };
  for (const auto& [storage, value] : latest) {
    if (value->uses().handles() > 0) {
      need(value);
    }
  }
  while (!next.empty()) {
    const auto& recipe = next.back()->recipe();
    next.pop_back();
    if (recipe && recipe->sequence > first) {
      for (const Input& input : recipe->inputs()) {
        need(input.value.get());
      }
    }
  }
  return needed;
}

}  // namespace

// Examines the last `window` values, which are all in the map. Returns those that a store has yet
// to take, and that a handle needs, directly or for a replay. Leaves out a value whose only readers
// are recipes that no handle needs so far: most such recipes are never needed.
std::vector<c10::intrusive_ptr<Value>> ValueMap::dueAndNeeded(size_t window) const {
  const auto latest = made_.latest(window);
  std::vector<c10::intrusive_ptr<Value>> found;
  uint64_t first = UINT64_MAX;  // no recipe before this one reads a value to be sent
  for (const SweepWindow::Entry& entry : latest) {
    const auto& recipe = entry.second->recipe();
    first = isToLeave(entry) ? std::min(first, recipe ? recipe->sequence : 0) : first;
  }
  if (first == UINT64_MAX) {
    return found;
  }
  const auto needed = neededBy(latest, first);
  for (auto entry = latest.rbegin(); entry != latest.rend(); ++entry) {
    if (isToLeave(*entry) && needed.count(entry->second) > 0) {
      found.push_back(values_.find(entry->first)->second);
    }
  }
  return found;
}

std::vector<c10::intrusive_ptr<Value>> ValueMap::due() const {
  std::vector<c10::intrusive_ptr<Value>> found;
  for (const auto& [storage, value] : values_) {
    if (value->decision().isDue() && value->home().bytes()) {
      found.push_back(value);
    }
  }
  const auto sequence = [](const auto& value) {
    return value->recipe() ? value->recipe()->sequence : 0;
  };
  std::sort(found.begin(), found.end(), [&](const auto& a, const auto& b) {
    return sequence(a) > sequence(b);
  });
  return found;
}

}  // namespace ebb
