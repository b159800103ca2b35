#include "record/recorder.h"

#include <ATen/SequenceNumber.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <utility>

#include "hooks/store.h"
#include "intercept/install.h"
#include "intercept/op_traits.h"
#include "record/op_recording.h"
#include "record/retention.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

// Called for a kept value. True if ebb keeps the value only for recipes: autograd did not pack it.
bool isOnlyRead(const Value& value) {
  return value.uses().packed() == 0 && value.decision().rule() != Verdict::kNoRule &&
         !value.decision().isDue() && !value.stash();
}

// Note [State that each forward updates]
// A buffer written in this region (a spectral norm's vectors, a counter) will be written again in
// the next forward, perhaps in another region before this region's backward. If recipes read a
// small buffer, ebb copies the buffer when the region ends. ebb does not copy larger buffers
// (gathered parameters, a momentum encoder): a second write before backward is then an error.
bool mustOutliveNextWrite(const Value& value) {
  constexpr size_t kSmall = size_t{1} << 20;
  return value.facts().writtenHere && value.state() == ValueState::Held &&
         !value.home().isPrivate() && value.home().nbytes() <= kSmall && value.uses().readers() > 0;
}

// Drops the recipe of a value whose bytes no other code can write: see Note [Unpacked bytes may be
// written]. Runs before prepareForAfterRegion(), which then keeps no inputs of dropped recipes.
void dropUnneededRecipe(Value& value) {
  if (value.ownsItsBytes()) {
    value.dropRecipe(true);
  } else if (
      value.decision().isSaved() && !value.home().bytes() && !value.stash() &&
      value.uses().readers() == 0) {
    // Handles hold the storage for autograd. Without another holder nothing will write to the
    // storage. The value then needs no recipe, and the recipe's inputs can be freed.
    const auto home = value.home().storage().lock();
    if (home && home.use_count() <= 1 + value.uses().handles()) {
      value.dropRecipe();
    }
  }
}

// Called after the program has named a value that has a recipe. Replaces the value's decision by
// that of the rule for this name: see Note [Names].
void decideAgain(const Context& context, Value& value, const Verdict& verdict) {
  Store* store = storeOf(verdict.decision);
  const bool tooLate = store != nullptr && !store->mayBeChosen(value);
  const ValueDecision decision(tooLate ? Decision::Save : verdict.decision, true, verdict.rule);
  value.decide(value.recipe()->op.limits.constantFill ? decision.orKept() : decision);
  if (tooLate) {
    store->staysInstead(context, value);
  }
  context.graph->observers.tell(&OpEvents::decidedAgain, context, value);
}

void countPacked(RegionCounters& counters, const Value& value, Retention retention) {
  if (value.facts().madeHere && retention != Retention::Away) {
    const bool kept = isResident(retention);
    (kept ? counters.bytesPacked : counters.bytesDropped) += value.home().nbytes();
    counters.bytesSaved += kept ? value.home().nbytes() : 0;
  }
}

// How a handle keeps the bytes of `value`.
Retention retentionFor(const Value& value) {
  return retentionOf(
      {.away = value.stash().defined(),
       .keeps = value.decision().isKept(),
       .byPolicy = value.decision().isSaved(),
       .hasRecipe = value.recipe().defined()});
}

// Prepares a value for writes after the region's end, which ebb does not see.
void guardAgainstWrites(const Context& context, Keeper& keeper, Value& value) {
  if (value.uses().readers() > 0) {
    context.counters->bytesEscaped += escapedStorage(value) ? value.home().nbytes() : 0;
    if (value.recipe() || value.stash()) {
      keeper.watchEscaped(value);
    }
  }
  if (value.recipe() && !value.versions().areCounted()) {
    value.loseStorage();  // an inference tensor: a write to it would not be noticed any more
  }
  if (value.facts().inTransit && value.home().bytes() && !value.home().isPrivate() &&
      value.home().bytes().nbytes() == value.home().nbytes()) {
    keeper.takeFingerprint(value);
  }
  if (mustOutliveNextWrite(value)) {
    keeper.joinStreams();
    makePrivate(*context.graph, value, *context.counters);
  }
}

}  // namespace

Recorder* openRecorder() {
  return tlsInterceptor ? static_cast<Recorder*>(&tlsInterceptor->recorder()) : nullptr;
}

void Recorder::open(c10::intrusive_ptr<Graph> graph) { context_.graph = std::move(graph); }

void Recorder::workFor(
    Decider& decider, RegionCounters& counters, uint16_t region, uint32_t nested,
    bool trustCustomOps, RegionNotes& notes) {
  context_.decider = &decider;
  context_.counters = &counters;
  context_.region = region;
  context_.nested = nested;
  context_.trustCustomOps = trustCustomOps;
  context_.notes = &notes;
}

void Recorder::call(Call& call) {
  ++context_.counters->opsSeen;
  if (operatorsAreNew.load(std::memory_order_relaxed)) {
    installInterception();
  }
  switch (call.op.kind) {
    case OpKind::PassThrough:
      call.run();
      return;
    case OpKind::InplaceView:
      callInplaceView(call);
      return;
    case OpKind::Recorded:
      if (call.op.arguments.writes && (needed_.any() || earlierParts_.any())) {
        forEachWritten(call.op.arguments, call.arguments, [this](const at::Tensor& tensor) {
          beforeWrite(tensor);
        });
      }
      OpRecording(context_, values_, call).run();
      return;
  }
}

[[gnu::cold]] void Recorder::beforeWrite(const at::Tensor& tensor) {
  needed_.beforeWrite(tensor, context_);
  earlierParts_.beforeWrite(tensor, context_);
}

void Recorder::aliased(const at::Tensor& tensor, const at::Tensor& result) {
  if (!isRecordable(tensor) || !isRecordable(result) || storageOf(tensor) != storageOf(result)) {
    return;
  }
  std::lock_guard<PythonMutex> lock(context_.graph->mutex);
  values_.applyDeferred();
  if (const auto* known = values_.find(tensor)) {
    (*known)->versions().learn(result.unsafeGetTensorImpl()->version_counter());
  }
}

// Note [In-place views]
// t_, set_ and similar ops change a tensor's geometry or storage, not the contents of a storage.
// resize_ changes no contents if the storage is large enough. Otherwise the storage gets larger
// memory, which begins with a copy of the old bytes. resize_ and resize_as_ move the version only
// if they change the sizes.
[[gnu::cold]] void Recorder::callInplaceView(Call& call) {
  const at::Tensor tensor = call.arguments[0].toTensor();
  c10::intrusive_ptr<Value> before;
  c10::intrusive_ptr<Stash> stash;  // another thread may take the value's own reference
  c10::Storage storage;
  c10::VariableVersion counter;
  if (tensor.defined() && isRecordable(tensor)) {
    beforeWrite(tensor);
    std::lock_guard<PythonMutex> lock(context_.graph->mutex);
    values_.applyDeferred();
    storage = tensor.storage();
    if (auto* known = values_.find(tensor)) {
      before = values_.current(*known, tensor);
      stash = before->stash();
      counter = tensor.unsafeGetTensorImpl()->version_counter();
    }
  }
  if (stash) {
    stash->beforeWrite();  // the storage may get other memory
  }
  const c10::SmallVector<int64_t, 6> sizes(before ? tensor.sizes() : c10::IntArrayRef());
  call.run();
  if (before) {
    std::lock_guard<PythonMutex> lock(context_.graph->mutex);
    if (storage.nbytes() == before->home().nbytes()) {
      const bool counted =
          call.op.arguments.counted[0] || tensor.sizes() != c10::IntArrayRef(sizes);
      if (counted && !insidePythonDispatch()) {
        values_.deferVersionCheck({std::move(before), nullptr, {}, std::move(counter), true});
      }
    } else {
      values_.storageGrew(before, storage);
    }
  }
}

// Note [Opaque writes]
// The user declares a write to a tensor by code that torch does not see. ebb ends the tensor's old
// state as for any write. Handles show the written contents, as in eager, where the write moves no
// version. The contents are unknown during the write, so results of readers at that time are kept.
// Afterwards the tensor is a new leaf. If the tensor came from outside the region, an earlier graph
// may know the tensor too and need the old contents. So ebb moves the version, and a replay that
// needs the old contents raises.
[[gnu::cold]] void Recorder::opaqueWriteBegins(const at::Tensor& tensor) {
  if (isRecordable(tensor)) {
    beforeWrite(tensor);
    std::lock_guard<PythonMutex> lock(context_.graph->mutex);
    values_.replaceByLeaf(tensor, UnseenWrite::OpaqueBegins);
  }
}

// Note [Names]
// The user names a value after its op has returned, when autograd may already have packed the
// value. If the name makes ebb keep the value, the bytes are held at once for existing handles and
// recipes, and as usual for later ones. If autograd has packed the value as kept, a name does not
// free its bytes.
void Recorder::name(const at::Tensor& tensor, const std::string& name) {
  if (!isRecordable(tensor)) {
    return;
  }
  std::lock_guard<PythonMutex> lock(context_.graph->mutex);
  values_.applyDeferred();
  const auto* known = values_.find(tensor);
  if (known == nullptr || !(*known)->recipe() || !(*known)->versions().areUnmoved()) {
    return;
  }
  const c10::intrusive_ptr<Value> value = *known;
  const auto verdict =
      context_.decider->decideOnNamed(value->recipe()->op, tensor, value->decision().rule(), name);
  if (!verdict) {
    return;
  }
  const bool wasKept = value->decision().isKept();
  decideAgain(context_, *value, *verdict);
  const bool needed = value->uses().packed() > 0 || value->uses().readers() > 0;
  if (!wasKept && value->decision().isKept() && needed && !value->home().bytes()) {
    keeper_.keep(*value, tensor, value->uses().packed() > 0);
  } else if (!value->decision().isKept() && !value->uses().relyOnBytes()) {
    value->release();
  }
}

[[gnu::cold]] void Recorder::opaqueWriteEnds(const at::Tensor& tensor) {
  if (isRecordable(tensor)) {
    std::lock_guard<PythonMutex> lock(context_.graph->mutex);
    values_.replaceByLeaf(tensor, UnseenWrite::OpaqueEnds);
  }
}

// See Note [Communication]
[[gnu::cold]] void Recorder::collectiveWrites(const at::Tensor& tensor) {
  if (isRecordable(tensor)) {
    beforeWrite(tensor);
    std::lock_guard<PythonMutex> lock(context_.graph->mutex);
    values_.replaceByLeaf(tensor, UnseenWrite::Collective);
  }
}

// The handle refers to `value`, which autograd has packed.
static void hold(Packed& packed, const c10::intrusive_ptr<Value>& value, Retention retention) {
  packed.recompute = retention != Retention::Saved;
  packed.latest = retention == Retention::Recomputed ? LatestState::of(*value) : nullptr;
  (packed.latest ? packed.latest->value : packed.value) = HandleOn(value);
}

Packed Recorder::pack(const at::Tensor& tensor, bool part) {
  if (!isRecordable(tensor)) {
    return {};
  }
  std::lock_guard<PythonMutex> lock(context_.graph->mutex);
  values_.applyDeferred();
  auto* known = values_.find(tensor);
  Graph& graph = *context_.graph;
  if (known == nullptr && !keeper_.storesInput(tensor) && !graph.observers.wantInput(tensor)) {
    return {};
  }
  const auto& value = known ? values_.current(*known, tensor) : values_.current(tensor);
  Packed packed;
  packed.producer = value->recipe() ? value->recipe()->op.name.c_str() : nullptr;
  keeper_.packs(*value, tensor);
  const Retention retention = retentionFor(*value);
  const bool showsWrites =
      part || !value->versions().isWriters(tensor.unsafeGetTensorImpl()->version_counter());
  if (value->uses().notePacked(showsWrites, retention == Retention::Away)) {
    countPacked(*context_.counters, *value, retention);
  }
  packed.note = graph.observers.packed(*value, tensor, retention);
  packed.node = static_cast<uint32_t>(at::sequence_number::peek());
  if (retention != Retention::Unmanaged) {
    hold(packed, value, retention);
  }
  if (packed.recompute) {
    graph.streams.use(*value, tensor.storage());  // autograd does not hold the storage
  }
  if (retention == Retention::Recomputed) {
    graph.numbers.packs.add(value, packed.node);
  }
  return packed;
}

bool Recorder::storageEmptied(c10::StorageImpl* storage) {
  needed_.storageEmptied(storage);
  earlierParts_.storageEmptied(storage);
  const auto found = values_.all().find(storage);
  const bool restores = found != values_.all().end() && !found->second->facts().madeHere &&
                        found->second->uses().readers() > 0;
  if (restores) {
    emptied_.push_back(storage);
  }
  return restores;
}

void Recorder::addNeed(EarlierNeeds& needs, const c10::intrusive_ptr<Value>& value) {
  const c10::StorageImpl* storage = value->home().storage()._unsafe_get_target();
  if (std::find(emptied_.begin(), emptied_.end(), storage) == emptied_.end()) {
    needs.add(value, context_.graph);
  }
}

void Recorder::close(bool onlyPart) {
  const auto forget = c10::make_scope_exit([this, onlyPart] {
    values_.clear();
    keeper_.clear();
    emptied_.clear();
    if (!onlyPart && earlierParts_.any()) {
      earlierParts_.clear();
    }
    context_.graph.reset();
  });
  std::lock_guard<PythonMutex> lock(context_.graph->mutex);
  const Observers& observers = context_.graph->observers;
  observers.tell(&RegionEvents::willClose);
  values_.applyDeferred();
  for (const auto& entry : values_.all()) {
    dropUnneededRecipe(*entry.second);
    if (onlyPart) {
      addNeed(earlierParts_, entry.second);
    }
  }
  for (const auto& entry : values_.all()) {
    prepareForAfterRegion(entry.second);
  }
  observers.tell(&RegionEvents::closes, values_);
  if (auto due = values_.due(); !due.empty()) {
    values_.clear();
    keeper_.putNeeded(std::move(due));
  }
  if (observers.seeOps()) {
    values_.clear();
    observers.tell(&RegionEvents::closed);
  }
}

void Recorder::prepareForAfterRegion(const c10::intrusive_ptr<Value>& entry) {
  Value& value = *entry;
  if (value.releaseGone() && !value.home().bytes()) {
    return;  // nothing can be written or read
  }
  guardAgainstWrites(context_, keeper_, value);
  if (value.home().bytes() && value.facts().madeHere && isOnlyRead(value)) {
    context_.counters->bytesSaved += value.home().nbytes();
  }
  if (value.home().isPrivate()) {
    return;  // no other code has the bytes
  }
  if (value.facts().madeHere && !value.home().storage().expired()) {
    results_.add(value, context_.graph);
  }
  const bool isRead = value.state() == ValueState::Held && value.uses().readers() > 0;
  if (isRead && (value.facts().madeHere || value.facts().isEarlierResult)) {
    addNeed(needed_, entry);
  }
}

}  // namespace ebb
