#include "record/value_map.h"

#include <algorithm>
#include <utility>

#include "graph/recipe.h"
#include "graph/rows.h"
#include "memory/bytes.h"
#include "memory/relief.h"
#include "memory/stash.h"
#include "memory/stillness.h"
#include "record/notes.h"
#include "record/results.h"
#include "record/sender.h"
#include "verify/compare.h"

namespace ebb {
namespace {

// See Note [When dead values are looked for]
constexpr size_t kSweepBytes = size_t{16} << 20;

// What would die if references to values were given up. Nothing is.
class Dying {
 public:
  // One more reference to `value`.
  void release(const Value& value) {
    giveUp(value);
    while (!next_.empty()) {
      const Value& dead = *next_.back();
      next_.pop_back();
      const auto& recipe = dead.recipe;
      if (recipe && ++released_[recipe.get()] == recipe.use_count()) {
        for (uint32_t i = 0; i < recipe->inputCount; ++i) {
          if (recipe->inputs[i].value) {
            giveUp(*recipe->inputs[i].value);
          }
        }
      }
    }
  }

  bool has(const Value& value) const {
    const auto released = released_.find(&value);
    return released != released_.end() && released->second == useCount(value);
  }

 private:
  static size_t useCount(const Value& value) {
    return c10::raw::intrusive_ptr::use_count(const_cast<Value*>(&value));
  }
  void giveUp(const Value& value) {
    if (++released_[&value] == useCount(value)) {
      next_.push_back(&value);
    }
  }

  ska::flat_hash_map<const c10::intrusive_ptr_target*, size_t> released_;  // how often
  std::vector<const Value*> next_;  // that are dead, and have not given up what they refer to
};

}  // namespace

bool ownsItsBytes(const Value& value) {
  return value.bytes && value.bytes.nbytes() == value.nbytes &&
         value.bytes.use_count() <= 1 + (value.backsHandles ? 0 : value.handles.load());
}

void dropRecipe(Value& value) {
  if (!value.due) {
    value.recipe.reset();
  }
}

c10::Storage escapedStorage(const Value& value) {
  if (!value.recipe || value.isKept() || value.opaque > 0 || value.home.expired() ||
      !value.versionHolds() || (value.rows && value.rows->lossy)) {
    return {};
  }
  c10::Storage living = value.living();
  const size_t ours = value.heldAhead ? 2 : 1;
  return living && living.use_count() > ours ? living : c10::Storage();
}

void moveVersionIfNeeded(const at::Tensor& tensor, size_t ours) {
  if (!isRecordable(tensor) || tensor.is_inference()) {
    return;
  }
  // Values know their storage weakly.
  if (weakReferencesTo(tensor.storage()) > 1 + ours) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

void moveVersionOfComputed(const at::Tensor& tensor, size_t ours) {
  if (tensor.requires_grad() && !tensor.is_leaf()) {
    moveVersionIfNeeded(tensor, ours);
  }
}

// If others have written to it unseen already, the copy is of no use.
[[gnu::cold]] void makePrivate(Graph& graph, Value& value, RegionCounters& counters) {
  if (value.bytes.nbytes() < value.nbytes) {
    return;  // somebody freed it; a replay that needs it will say so
  }
  graph.streams.use(value, value.bytes);
  value.bytes = withRelief([&] { return copyOf(value.bytes, value.nbytes); });
  graph.streams.made(value, value.bytes);
  value.tampered = hasChanged(value, value.bytes, graph.verify);
  value.isPrivate = true;
  counters.bytesCopied += value.nbytes;
  if (value.entry) {
    noteCopied(value);
  }
}

void ValueMap::clear() {
  // Clearing takes as long as the table is large: one unusually long region must not slow all.
  if (values_.bucket_count() > 8 * (values_.size() + 8)) {
    Map().swap(values_);
  }
  values_.clear();
  unsettled_.clear();
  made_.clear();
}

// Note [Version stamps]
// A value remembers the version counter of the tensor it was last written through and the number
// it showed. Reading the storage through a tensor whose version has moved, without a write that we
// saw, means that somebody wrote below us (a compiled function, mark_dirty): the storage then is a
// new leaf, never the stale recipe. So is one that somebody has resized, or given other memory, by
// hand. In-place ops move the version after their kernel returned, so the stamp of a written value
// is settled when the next op, pack or exit comes by: by one, and only where torch will have moved
// it, see Note [Which writes are counted]. An op that a __torch_dispatch__ calls has autograd
// behind it, so no version moves. Aliases may have counters of their own (`x.data`, the results of
// _unsafe_view and unsafe_chunk, parameters in one flat buffer). A value knows all that have shown
// its storage, and holds only while none of them moves. On a storage that came from outside, a
// counter first met now is taken as it is; on one that was made inside the region only if it shows
// that it has never written.
c10::intrusive_ptr<Value>& ValueMap::current(const at::Tensor& tensor) {
  return current(values_[storageOf(tensor)], tensor);
}

c10::intrusive_ptr<Value>& ValueMap::current(
    c10::intrusive_ptr<Value>& slot, const at::Tensor& tensor) {
  if (slot && slot->underWay && slot->packed == 0 && !slot->bytes) {  // see Note [Communication]
    slot->otherCounters.reset();
    slot->stamp(tensor);
    return slot;
  }
  if (slot) {
    const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
    const c10::StorageImpl* storage = storageOf(tensor);
    const bool sameMemory = storage->nbytes() == slot->nbytes && storage->data() == slot->address;
    if (sameMemory && (!counter.enabled() || !slot->written.counter.enabled())) {
      return slot;
    }
    if (sameMemory && slot->versionHolds()) {
      if (slot->knows(counter)) {
        return slot;
      }
      if (!slot->madeHere || counter.current_version() == 0) {
        slot->learn(counter);
        return slot;
      }
    }
    slot->superseded = true;
    if (slot->witness) {
      stateEnds(*slot, false);
    }
    if (slot->packed > 0) {
      slot->redefined = tensor.storage();
    }
  }
  const uint8_t opaque = slot ? slot->opaque : 0;
  bool isResult = slot && slot->isResult;
  if (const WeakGraph* maker = slot ? nullptr : context_.results->madeBy(tensor)) {
    isResult = true;
    Lookahead* lookahead = context_.graph->lookahead.get();
    if (lookahead && !maker->expired()) {
      lookahead->reads(*maker);
    }
  }
  slot = c10::make_intrusive<Value>();
  made_.add(storageOf(tensor), slot.get());
  slot->stamp(tensor);
  if (sender_.offloadsInput(tensor)) {
    slot->decide(context_.decider->inputs(), false);
  }
  slot->mustBeKept();
  slot->isResult = isResult;
  slot->opaque = opaque;
  if (context_.graph->journal) {
    noteMade(context_, *slot, tensor, "from outside", nullptr);
  }
  return slot;
}

// Note [Copy on write]
// `value`'s storage is about to be written. If its bytes are kept there and recipes still need
// them, they are copied first, so that a replay sees what the forward saw. A value with a recipe
// is made again instead.
void ValueMap::supersede(const c10::intrusive_ptr<Value>& value, size_t indifferent) {
  if (value->witness) {
    stateEnds(*value, true);
  }
  value->superseded = true;
  value->home.reset();
  if (value->slice && value->bytes) {
    sender_.send(*value, c10::Storage(value->bytes));
  }
  if (value->stash) {
    value->stash->beforeWrite();
    value->isPrivate = true;
  }
  if (!value->bytes || value->isPrivate) {
    return;
  }
  const auto needed = [&] { return !value->recipe && value->recipeReaders() > indifferent; };
  if (needed()) {
    dropUnused(made_.size());  // recipes that only the map keeps alive need nothing
  }
  if (needed()) {
    makePrivate(*context_.graph, *value, *context_.counters);
  } else {
    value->bytes = c10::Storage();
  }
}

// Note [Silent writes]
// Eager's saved tensors share the storage, so a write that does not move their version is seen by
// backward. A handle on a recomputed value follows such a write: `redefined` keeps the storage.
ValueMap& ValueMap::settle() {
  for (Unsettled& entry : unsettled_) {
    Value& after = *entry.after;
    if (entry.viewed.enabled()) {
      after.allowOne(entry.viewed);
      continue;
    }
    const bool counted = entry.counted && !after.versionHolds();
    if (entry.ahead != nullptr && entry.counted && !counted) {
      entry.ahead->movesFirst.store(true, std::memory_order_relaxed);
    }
    if (counted) {
      ++after.written.version;  // by one: more than that, and somebody else wrote too
    }
    if (entry.before && (!counted || entry.before->follows ||
                         !sameCounter(after.written.counter, entry.before->written.counter))) {
      entry.before->redefined = entry.storage;
    }
  }
  unsettled_.clear();
  return *this;
}

[[gnu::cold]] void ValueMap::storageGrew(
    const c10::intrusive_ptr<Value>& value, const c10::Storage& storage) {
  if (value->witness) {
    stateEnds(*value, false);
  }
  value->superseded = true;
  if (value->packed > 0) {
    value->redefined = storage;  // eager's saved tensors share the storage
  }
  if (value->bytes && !value->isPrivate && !value->recipe) {
    makePrivate(*context_.graph, *value, *context_.counters);
  }
  values_.erase(storage.unsafeGetStorageImpl());
}

[[gnu::cold]] Value& ValueMap::replaceByLeaf(const at::Tensor& tensor) {
  settle();
  const c10::intrusive_ptr<Value> before = current(tensor);
  supersede(before, 0);
  if (before->packed > 0) {
    before->redefined = tensor.storage();
  }
  auto leaf = c10::make_intrusive<Value>();
  leaf->stamp(tensor);
  leaf->inheritCounters(*before);
  leaf->mustBeKept();
  leaf->madeHere = before->madeHere;
  leaf->writtenHere = !before->madeHere;
  leaf->opaque = before->opaque;
  if (context_.graph->journal) {
    noteMade(context_, *leaf, tensor, "ebb.opaque", "what wrote it was not seen");
  }
  Value& now = *leaf;
  put(storageOf(tensor), std::move(leaf));
  return now;
}

// See Note [When dead values are looked for]
bool ValueMap::needsSweep() const {
  return made_.isFull() || sender_.keptBytes() >= kSweepBytes;
}

void ValueMap::sweep() {
  const size_t left = dropUnused(made_.nextWindow());
  sender_.sendKept(neededToSend(left));
  sender_.forgetBytes();
}

// Forgets values that no program can name any more: nothing refers to them and their storage is
// gone, or only we hold it. Of the last `window`; consumers go before what they consume. Gives how
// many of them are left.
[[gnu::cold]] size_t ValueMap::dropUnused(size_t window) {
  return made_.sweep(window, [&](const MadeValues::Entry& made) {
    const auto entry = values_.find(made.first);
    if (entry == values_.end() || entry->second.get() != made.second) {
      return true;  // another state has come
    }
    Value& value = *entry->second;
    const bool isOwned = ownsItsBytes(value);
    if (isOwned) {
      dropRecipe(value);
    }
    const bool isDead = entry->second.unique() && (isOwned || value.home.expired());
    if (isDead) {
      values_.erase(entry);
    }
    return isDead;
  });
}

// What is to leave, among the last `window`, all of which are there, and would be needed if the
// region ended here. Not what only recipes read whose results nobody has saved so far: most such
// recipes are never needed.
std::vector<c10::intrusive_ptr<Value>> ValueMap::neededToSend(size_t window) const {
  const auto latest = made_.latest(window);
  std::vector<c10::intrusive_ptr<Value>> found;
  const auto isToLeave = [](const MadeValues::Entry& entry) {
    return entry.second->due && entry.second->bytes;
  };
  if (std::none_of(latest.begin(), latest.end(), isToLeave)) {
    return found;
  }
  Dying dying;
  for (const auto& [storage, value] : latest) {
    dying.release(*value);
  }
  for (auto entry = latest.rbegin(); entry != latest.rend(); ++entry) {
    if (isToLeave(*entry) && !dying.has(*entry->second)) {
      found.push_back(values_.find(entry->first)->second);
    }
  }
  return found;
}

std::vector<c10::intrusive_ptr<Value>> ValueMap::keptToSend() const {
  std::vector<c10::intrusive_ptr<Value>> found;
  for (const auto& [storage, value] : values_) {
    if (value->due && value->bytes) {
      found.push_back(value);
    }
  }
  const auto sequence = [](const auto& value) {
    return value->recipe ? value->recipe->sequence : 0;
  };
  std::sort(found.begin(), found.end(), [&](const auto& a, const auto& b) {
    return sequence(a) > sequence(b);
  });
  return found;
}

}  // namespace ebb
