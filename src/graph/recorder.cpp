#include "graph/recorder.h"

#include <algorithm>
#include <functional>

#include "graph/fingerprint.h"
#include "graph/op_recording.h"
#include "graph/witness.h"
#include "residency/paging.h"

namespace ebb {
namespace {

// See Note [When dead values are looked for]
constexpr size_t kSweepEntries = 512;
constexpr size_t kSweepBytes = size_t{16} << 20;

}  // namespace

void Recorder::open(c10::intrusive_ptr<Graph> graph) {
  graph_ = std::move(graph);
  sweepAt_ = kSweepEntries;
  keptBytes_ = 0;
}

void Recorder::enter(Decider* decider, uint16_t region, RegionCounters* counters) {
  decider_ = decider;
  region_ = region;
  counters_ = counters;
}

void Recorder::call(Call& call) {
  ++counters_->opsSeen;
  switch (call.op.kind) {
    case OpKind::PassThrough:
      call.run();
      return;
    case OpKind::InplaceView:
      callInplaceView(call);
      return;
    case OpKind::Recorded:
      OpRecording(*this, call).run();
      return;
  }
}

void Recorder::aliased(const at::Tensor& tensor, const at::Tensor& result) {
  if (!isRecordable(tensor) || !isRecordable(result) || storageOf(tensor) != storageOf(result)) {
    return;
  }
  std::lock_guard<std::recursive_mutex> lock(graph_->mutex);
  settle();
  const auto found = values_.find(storageOf(tensor));
  if (found != values_.end()) {
    found->second->learn(result.unsafeGetTensorImpl()->version_counter());
  }
}

// Note [In-place views]
// t_, set_ and the like change what a tensor shows, not what a storage holds. resize_ does neither
// to a storage that is large enough; else the storage gets other memory, with the old bytes first.
[[gnu::cold]] void Recorder::callInplaceView(Call& call) {
  const at::Tensor tensor = call.arguments[0].toTensor();
  c10::intrusive_ptr<Value> before;
  c10::Storage storage;
  c10::VariableVersion counter;
  if (tensor.defined() && isRecordable(tensor)) {
    std::lock_guard<std::recursive_mutex> lock(graph_->mutex);
    settle();
    storage = tensor.storage();
    if (values_.count(storage.unsafeGetStorageImpl()) > 0) {
      before = currentValue(tensor);
      counter = tensor.unsafeGetTensorImpl()->version_counter();
    }
  }
  if (before && before->stash) {
    before->stash->beforeWrite();  // it may get other memory
  }
  call.run();
  if (before) {
    std::lock_guard<std::recursive_mutex> lock(graph_->mutex);
    if (storage.nbytes() == before->nbytes) {
      unsettled_.push_back({std::move(before), nullptr, {}, std::move(counter)});
    } else {
      storageGrew(before, storage);
    }
  }
}

[[gnu::cold]] void Recorder::storageGrew(
    const c10::intrusive_ptr<Value>& value, const c10::Storage& storage) {
  if (value->witness) {
    stateEnds(*value, false);
  }
  value->superseded = true;
  if (value->packed > 0) {
    value->redefined = storage;  // eager's saved tensors share the storage
  }
  if (value->bytes && !value->isPrivate && !value->recipe) {
    makePrivate(*value);
  }
  values_.erase(storage.unsafeGetStorageImpl());
}

// Note [Uninitialised memory is not a recipe]
// A kernel that bypasses the dispatcher may fill what `empty` returned, so its result stays a leaf
// until an op that we see overwrites it. The result of zeros, ones or full is recomputed only if
// the first op that uses it writes to it; if the first use is a read, somebody may have filled it
// unseen, and it becomes a leaf.

// Note [Version stamps]
// A value remembers the version counter of the tensor it was last written through and the number
// it showed. Reading the storage through a tensor whose version has moved, without a write that we
// saw, means that somebody wrote below us (a compiled function, mark_dirty): the storage then is a
// new leaf, never the stale recipe. In-place ops move the version after their kernel returned, so
// the stamp of a written value is settled when the next op, pack or exit comes by, by one at most.
// Aliases may have counters of their own (`x.data`, the results of _unsafe_view and unsafe_chunk,
// parameters in one flat buffer). A value knows all that have shown its storage, and holds only
// while none of them moves. On a storage that came from outside, a counter first met now is taken
// as it is; on one that was made inside the region only if it shows that it has never written.
c10::intrusive_ptr<Value>& Recorder::currentValue(const at::Tensor& tensor) {
  return current(values_[storageOf(tensor)], tensor);
}

c10::intrusive_ptr<Value>& Recorder::current(
    c10::intrusive_ptr<Value>& slot, const at::Tensor& tensor) {
  if (slot) {
    const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
    if (!counter.enabled() || !slot->counter.enabled()) {
      return slot;
    }
    if (slot->versionHolds()) {
      if (slot->knows(counter)) {
        return slot;
      }
      if (!slot->born || counter.current_version() == 0) {
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
  slot = c10::make_intrusive<Value>();
  slot->stamp(tensor);
  slot->keep = true;
  slot->offload = offloadsInput(tensor);
  slot->paged = slot->offload && decider_->inputs() == Decision::Page;
  slot->opaque = opaque;
  if (graph_->journal) {
    noteMade(*slot, tensor, "from outside", nullptr);
  }
  return slot;
}

// Note [Copy on write]
// `value`'s storage is about to be written. If its bytes are kept there and recipes still need
// them, they are copied first, so that a replay sees what the forward saw. A value with a recipe
// is made again instead. `ownReferences` are those that do not need the old state.
void Recorder::supersede(const c10::intrusive_ptr<Value>& value, size_t ownReferences) {
  if (value->witness) {
    stateEnds(*value, true);
  }
  value->superseded = true;
  value->home.reset();
  if (value->part && value->bytes) {
    send(*value, c10::Storage(value->bytes));
  }
  if (value->stash) {
    value->stash->beforeWrite();
    value->isPrivate = true;
  }
  if (!value->bytes || value->isPrivate) {
    return;
  }
  const auto needed = [&] { return !value->recipe && readers(value) > ownReferences; };
  if (needed()) {
    dropUnused();  // recipes that only the map keeps alive need nothing
  }
  if (needed()) {
    makePrivate(*value);
  } else {
    value->bytes = c10::Storage();
  }
}

// Gives a leaf a copy of its bytes, which others may write to. If that has happened unseen already,
// the copy is of no use.
[[gnu::cold]] void Recorder::makePrivate(Value& value) {
  if (value.bytes.nbytes() < value.nbytes) {
    return;  // somebody freed it; a replay that needs it will say so
  }
  value.bytes = copyOf(value.bytes, value.nbytes);
  value.tampered = hasChanged(value, value.bytes, graph_->verify);
  value.isPrivate = true;
  counters_->bytesCopied += value.nbytes;
  if (value.entry) {
    noteCopied(value);
  }
}

// Note [Silent writes]
// Eager's saved tensors share the storage, so a write that does not move their version is seen by
// backward. A handle on a recomputed value follows such a write: `redefined` keeps the storage.
void Recorder::settle() {
  for (Unsettled& entry : unsettled_) {
    Value& after = *entry.after;
    if (entry.viewed.enabled()) {
      after.allowOne(entry.viewed);
      continue;
    }
    const bool counted = !after.versionHolds();
    if (counted) {
      ++after.version;  // by one: more than that, and somebody else wrote too
    }
    if (entry.before &&
        (!counted || entry.before->follows || !sameCounter(after.counter, entry.before->counter))) {
      entry.before->redefined = entry.storage;
    }
  }
  unsettled_.clear();
}

// Note [When dead values are looked for]
// A kept value lives at least as long as the map names it, though everything that read it may be
// gone: without gradients that is every kept value. So the map is swept when it has doubled, and
// whenever this many bytes have been kept since the last time.
void Recorder::keep(Value& value, const at::Tensor& tensor) {
  if (!value.paged) {
    value.offload = value.offload && canLeave(value, tensor);  // its rows may yet be marked
  }
  value.bytes = tensor.storage();
  keptBytes_ += value.nbytes;
  if (!value.saved) {
    value.recipe.reset();
    const bool verify = graph_->verify != VerifyMode::Off;
    value.fingerprint =
        fingerprint(value.bytes, verify ? FingerprintOf::Everything : FingerprintOf::Samples);
  }
}

bool Recorder::needsSweep() const {
  return values_.size() >= sweepAt_ || keptBytes_ >= kSweepBytes;
}

void Recorder::sweep() {
  dropUnused();
  sendKept(keptToSend(), 2);
  sweepAt_ = std::max(kSweepEntries, 2 * values_.size());
  keptBytes_ = 0;
}

// Whether only the value and its handles hold its kept bytes: nobody else can write to them any
// more, so no recipe is needed to make them again. Not if somebody resized them before.
bool Recorder::ownsItsBytes(const Value& value) {
  return value.bytes && value.bytes.nbytes() == value.nbytes &&
         value.bytes.use_count() <= 1 + (value.lent ? 0 : value.handles.load());
}

// Nobody can write to its bytes any more. Those that are to be sent may yet find no host memory.
void Recorder::dropRecipe(Value& value) {
  if (!value.offload) {
    value.recipe.reset();
  }
}

// Forgets values that no program can name any more: nothing refers to them and their storage is
// gone, or only we hold it. Consumers go before what they consume, so one pass is enough.
[[gnu::cold]] void Recorder::dropUnused() {
  std::vector<std::pair<uint64_t, c10::StorageImpl*>> latestFirst;
  latestFirst.reserve(values_.size());
  for (const auto& [storage, value] : values_) {
    latestFirst.emplace_back(value->recipe ? value->recipe->sequence : 0, storage);
    if (ownsItsBytes(*value)) {
      dropRecipe(*value);
    }
  }
  std::sort(latestFirst.begin(), latestFirst.end(), std::greater<>());
  for (const auto& [sequence, storage] : latestFirst) {
    const auto entry = values_.find(storage);
    const Value& value = *entry->second;
    if (entry->second.use_count() == 1 && (ownsItsBytes(value) || value.home.expired())) {
      values_.erase(entry);
    }
  }
}

// Note [Opaque writes]
// The user says that code which torch does not see writes to a tensor. Its state before is ended
// like by any write; handles on it follow, as they would in eager, where no version moves. While it
// is written nothing is known, so what reads it then is kept. Afterwards it is a new leaf. If it
// came from outside the region and an earlier graph knows it too, that graph may need what it held;
// so its version is moved, and whoever needs the old contents raises.
[[gnu::cold]] void Recorder::opaqueWriteBegins(const at::Tensor& tensor) {
  if (isRecordable(tensor)) {
    std::lock_guard<std::recursive_mutex> lock(graph_->mutex);
    ++replaceByLeaf(tensor).opaque;
  }
}

// Note [Names]
// A value is named after its op has returned, when autograd may have packed it already. If it is to
// be kept from now on, its bytes are held at once for those handles and recipes, and for what comes
// later as always. What was packed as kept stays so.
void Recorder::name(const at::Tensor& tensor, const std::string& name) {
  if (!isRecordable(tensor)) {
    return;
  }
  std::lock_guard<std::recursive_mutex> lock(graph_->mutex);
  settle();
  const auto found = values_.find(storageOf(tensor));
  if (found == values_.end() || !found->second->recipe || !found->second->versionHolds()) {
    return;
  }
  const c10::intrusive_ptr<Value> value = found->second;
  const auto verdict = decider_->decideOnNamed(value->recipe->op, tensor, value->rule, name);
  if (!verdict) {
    return;
  }
  value->rule = verdict->rule;
  if (value->entry) {
    const std::string* rule = graph_->journal->ruleThatDecided(decider_->ruleInWords(value->rule));
    value->entry->update([&](Line& line) { line.rule = rule; });
  }
  const bool wasKept = value->keep;
  value->saved = verdict->decision != Decision::Recompute;
  value->keep = value->saved || value->recipe->op.constantFill;
  // What has read it may have mixed rows that would not come back as they were.
  value->paged = verdict->decision == Decision::Page && readers(value) <= 2;
  value->offload = value->paged || verdict->decision == Decision::Offload;
  const bool tooLate = verdict->decision == Decision::Page && !value->paged;
  counters_->bytesNotPaged += tooLate ? value->nbytes : 0;
  if (value->rows) {
    value->rows->lossy |= value->paged;
  }
  value->part.reset();
  const bool needed = value->packed > 0 || readers(value) > 2;
  if (!wasKept && value->keep && needed && !value->bytes) {
    keep(*value, tensor);
    value->lent |= value->packed > 0;
  } else if (!value->keep && !value->lent) {
    value->bytes = c10::Storage();
  }
}

[[gnu::cold]] void Recorder::opaqueWriteEnds(const at::Tensor& tensor) {
  if (isRecordable(tensor)) {
    std::lock_guard<std::recursive_mutex> lock(graph_->mutex);
    Value& leaf = replaceByLeaf(tensor);
    leaf.opaque -= leaf.opaque > 0;
    if (!leaf.born) {
      moveVersionIfNeeded(tensor, 1);
      leaf.stamp(tensor);
    }
  }
}

[[gnu::cold]] Value& Recorder::replaceByLeaf(const at::Tensor& tensor) {
  settle();
  const c10::intrusive_ptr<Value> before = currentValue(tensor);
  supersede(before, 2);
  if (before->packed > 0) {
    before->redefined = tensor.storage();
  }
  auto leaf = c10::make_intrusive<Value>();
  leaf->stamp(tensor);
  leaf->inheritCounters(*before);
  leaf->keep = true;
  leaf->born = before->born;
  leaf->writtenHere = !before->born;
  leaf->opaque = before->opaque;
  if (graph_->journal) {
    noteMade(*leaf, tensor, "ebb.opaque", "what wrote it was not seen");
  }
  auto& slot = values_[storageOf(tensor)];
  slot = std::move(leaf);
  return *slot;
}

void moveVersionIfNeeded(const at::Tensor& tensor, size_t ours) {
  if (!isRecordable(tensor) || tensor.is_inference()) {
    return;
  }
  // Values know their storage weakly. The strong references count as one, and so does `weak`.
  const auto weak = tensor.storage().getWeakStorageImpl();
  if (weak.weak_use_count() > 2 + ours) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

Packed Recorder::pack(const at::Tensor& tensor, bool part) {
  if (!isRecordable(tensor)) {
    return {};
  }
  std::lock_guard<std::recursive_mutex> lock(graph_->mutex);
  settle();
  auto known = values_.find(storageOf(tensor));
  if (known == values_.end()) {
    if (!offloadsInput(tensor)) {
      return {};
    }
    known = values_.emplace(storageOf(tensor), nullptr).first;
  }
  const auto& value = current(known->second, tensor);
  Packed packed;
  if (value->recipe) {
    packed.producer = value->recipe->op.name.c_str();
  }
  value->follows |=
      part || !sameCounter(tensor.unsafeGetTensorImpl()->version_counter(), value->counter);
  if (value->part && !value->part->isOf(tensor)) {
    needAll(*value, tensor);
  }
  if (value->rows) {
    packedSince_.push_back(storageOf(tensor));
  }
  if (value->offload && canLeave(*value, tensor)) {
    sendOrWait(*value, tensor);
  } else {
    counters_->bytesNotPaged += value->offload && value->paged ? value->nbytes : 0;
    value->offload = false;
  }
  const bool moves = value->stash || value->part;
  const bool kept = !moves && (value->keep || !value->recipe);
  if (value->packed++ == 0 && value->born && !moves) {
    (kept ? counters_->bytesSaved : counters_->bytesDropped) += value->nbytes;
  }
  value->lent |= moves;
  if (value->entry) {
    const bool stays = value->paged && value->stash && graph_->pages->resident;
    notePacked(*value, kept || stays);
    packed.entry = value->entry;
  }
  if (!kept || value->saved) {
    packed.value = value;
    packed.recompute = !kept;
    ++value->handles;
  }
  return packed;
}

}  // namespace ebb
