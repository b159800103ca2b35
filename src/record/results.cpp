#include "record/results.h"

#include <algorithm>
#include <utility>

#include "graph/geometry.h"
#include "intercept/each_tensor.h"
#include "intercept/key.h"
#include "record/value_map.h"

namespace ebb {
namespace {

// True if backward needs the contents of the storage of `value`.
bool isNeeded(const Value& value) {
  return !value.home.isPrivate() && (value.uses.readers() > 0 || value.uses.handles() > 0);
}

}  // namespace

void Results::add(const Value& value, const c10::intrusive_ptr<Graph>& graph) {
  if (all_.size() >= sweepAt_) {
    forgetDead();
  }
  value.versions.forEach([&](const VersionStamp& stamp) { add(stamp.counter, graph); });
}

void Results::add(const c10::VariableVersion& counter, const c10::intrusive_ptr<Graph>& graph) {
  if (counter.enabled()) {
    all_.insert_or_assign(identityOf(counter), Made{counter, WeakGraph(graph)});
  }
}

const WeakGraph* Results::madeBy(const at::Tensor& tensor) const {
  const auto found = all_.find(identityOf(tensor.unsafeGetTensorImpl()->version_counter()));
  return found == all_.end() ? nullptr : &found->second.by;
}

// An entry is dead if only this map holds its counter.
void Results::forgetDead() {
  for (auto entry = all_.begin(); entry != all_.end();) {
    entry = entry->second.counter.unique() ? all_.erase(entry) : std::next(entry);
  }
  sweepAt_ = 2 * all_.size() + 64;
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
void ReadResults::add(
    const c10::intrusive_ptr<Value>& leaf, const c10::intrusive_ptr<Graph>& graph) {
  if (all_.size() >= sweepAt_) {
    forgetDead();
  }
  Readers& readers = all_[leaf->home.bytes().unsafeGetStorageImpl()];
  forgetDead(readers);
  readers.push_back({c10::weak_intrusive_ptr<Value>(leaf), WeakGraph(graph)});
}

[[gnu::cold]] void ReadResults::beforeCall(const Call& call, RegionCounters& counters) {
  forEachTensor(
      call.arguments, call.op.arguments.types, [&](const at::Tensor& tensor, size_t i, int32_t) {
        const ArgUse use = call.op.arguments.uses[i];
        if (tensor.defined() && use != ArgUse::Read && use != ArgUse::Unread) {
          beforeWrite(tensor, counters);
        }
      });
}

[[gnu::cold]] void ReadResults::beforeWrite(const at::Tensor& tensor, RegionCounters& counters) {
  const auto found = isRecordable(tensor) ? all_.find(storageOf(tensor)) : all_.end();
  if (found == all_.end()) {
    return;
  }
  const Readers readers = std::move(found->second);
  all_.erase(found);
  for (const Reader& reader : readers) {
    const auto graph = reader.graph.lock();
    const auto leaf = reader.leaf.lock();
    if (graph && leaf) {
      std::lock_guard<PythonMutex> lock(graph->mutex);
      const bool isRead = leaf->state() == ValueState::Held && leaf->uses.readers() > 0;
      if (isRead && !leaf->home.isPrivate() && leaf->available()) {
        makePrivate(*graph, *leaf, counters);
      }
    }
  }
}

void ReadResults::forgetDead(Readers& readers) {
  const auto dead = std::remove_if(
      readers.begin(), readers.end(), [](const Reader& reader) { return reader.leaf.expired(); });
  readers.erase(dead, readers.end());
}

void ReadResults::forgetDead() {
  for (auto entry = all_.begin(); entry != all_.end();) {
    forgetDead(entry->second);
    entry = entry->second.empty() ? all_.erase(entry) : std::next(entry);
  }
  sweepAt_ = 2 * all_.size() + 64;
}

// Note [Writes in a later part]
// Within a region ebb sees every write by an operator, and keeps or copies the old contents. A
// region that was split has several graphs, and the graph of an earlier part learns of a write only
// from the version counters it knows. A write through `.data`, or by a collective, moves none of
// them, so the part would recompute from other contents without noticing. ebb cannot copy the old
// contents: see Note [Results that are written later]. So ebb refuses such a write until the region
// ends, except to storages that the program has emptied, as FSDP does before it gathers them again.
// A write to running statistics (ArgUse::Scratch) is allowed, because no result depends on them.
void EarlierParts::add(
    const c10::intrusive_ptr<Value>& value, const c10::intrusive_ptr<Graph>& graph) {
  const c10::StorageImpl* storage = value->home.storage()._unsafe_get_target();
  const bool isEmptied = std::find(emptied_.begin(), emptied_.end(), storage) != emptied_.end();
  if (isNeeded(*value) && !isEmptied) {
    all_[storage].push_back({c10::weak_intrusive_ptr<Value>(value), WeakGraph(graph)});
  }
}

void EarlierParts::storageEmptied(const c10::StorageImpl* storage, bool splits) {
  all_.erase(storage);
  if (splits) {
    emptied_.push_back(storage);
  }
}

void EarlierParts::ended(bool onlyPart) {
  emptied_.clear();
  if (!onlyPart) {
    all_.clear();
  }
}

[[gnu::cold]] void EarlierParts::beforeCall(const Call& call, const std::string& region) const {
  const ArgumentTraits& traits = call.op.arguments;
  forEachTensor(call.arguments, traits.types, [&](const at::Tensor& tensor, size_t i, int32_t) {
    if (traits.uses[i] == ArgUse::Write || traits.uses[i] == ArgUse::Overwrite) {
      const bool counted = (traits.counted[i] && !insidePythonDispatch()) ||
                           (call.op.limits.communicates && isComputed(tensor));
      beforeWrite(tensor, counted, call.op.name, region);
    }
  });
}

[[gnu::cold]] void EarlierParts::beforeWrite(
    const at::Tensor& tensor,
    bool counted,
    const std::string& op,
    const std::string& region) const {
  const bool recordable = tensor.defined() && isRecordable(tensor);
  const auto found = recordable ? all_.find(storageOf(tensor)) : all_.end();
  if (found == all_.end()) {
    return;
  }
  for (const Needed& needed : found->second) {
    const auto graph = needed.graph.lock();
    const auto value = needed.value.lock();
    if (!graph || !value) {
      continue;
    }
    std::lock_guard<PythonMutex> lock(graph->mutex);
    const bool isSeen =
        counted && value->versions.know(tensor.unsafeGetTensorImpl()->version_counter());
    TORCH_CHECK(
        !isNeeded(*value) || isSeen,
        "ebb: ",
        op,
        " in region '",
        region,
        "' writes to a tensor that backward needs for earlier ops of the region, and torch does "
        "not count the write (a write through .data or by a collective, for example). ebb has "
        "split the region where the program freed a parameter, and cannot keep the old contents "
        "for the ops before. Let these ops read a copy (tensor.clone()), or write to the tensor "
        "after backward.");
  }
}

}  // namespace ebb
