#include "record/keeper.h"

#include <algorithm>
#include <utility>

#include "conditions/fingerprint.h"
#include "graph/recipe.h"
#include "intercept/in_transit.h"
#include "stream/stream.h"

namespace ebb {

bool isActivation(const at::Tensor& tensor) {
  return tensor.requires_grad() && !tensor.is_leaf() &&
         !(tensor.is_view() && tensor._base().is_leaf());
}

// Note [Stored values]
// ebb puts a value into a store (host memory, page pools) when autograd packs the value. A value
// read only by recipes at first stays on the device, since most recipes are never needed. When the
// region ends, ebb stores such a value if a handle needs it. A sweep of the recorder's map stores
// the values that ebb would store if the region ended at once. Afterwards a stash stands for the
// bytes, and the value needs no recipe. A visible write waits for the copy, so the stash surely
// holds the state before the write (Home::isPrivate). After an unseen write the version has moved,
// and reading the old state raises, as for a leaf. If the store has no room, ebb recomputes the
// value, or keeps a value without a recipe.
void Keeper::put(Value& value, const c10::Storage& storage) {
  value.decide(value.decision().withDue(false));
  Store& store = *storeOf(value.decision().chosen());
  StashPtr stash;
  if (storage.nbytes() == value.home().nbytes()) {  // else other code has resized the storage
    stash = store.put(context_, value, storage);
  }
  if (stash) {
    value.putAway(std::move(stash));
    if (std::find(used_.begin(), used_.end(), &store) == used_.end()) {
      used_.push_back(&store);
    }
    return;
  }
  context_.counters->bytesFellBack += value.home().nbytes();
  context_.graph->observers.tell(&OpEvents::notSent, value, store.whyFull());
  // Perhaps only this rank lacks memory.
  const bool recomputes = value.recipe() && !context_.graph->rules.sameOnAllRanks;
  if (recomputes) {
    value.release();
  }
  value.decide(value.decision().withoutStore(recomputes));
}

void Keeper::packs(Value& value, const at::Tensor& tensor) {
  if (!value.decision().isDue()) {
    return;
  }
  Store& store = *storeOf(value.decision().chosen());
  const bool arrives = isInTransit(tensor.storage());
  if (arrives) {
    context_.graph->observers.tell(
        &OpEvents::notSent, value, "an asynchronous collective may still be writing it");
  }
  if (!arrives && store.isReady(value) && store.accepts(value, tensor)) {
    put(value, tensor.storage());
  } else {
    store.staysInstead(context_, value);
    value.decide(value.decision().withDue(false));
  }
}

// Note [What is done later]
// At a sweep of the map and at the end of the region, ebb stores values read only by recipes, and
// copies small state. Both use the current stream. Another stream may have to write the bytes, and
// may not have done so yet. So ebb remembers the streams of such values, and the current stream
// waits for these streams.
void Keeper::noteStream(c10::Device device) {
  if (!device.is_cpu()) {
    const c10::Stream stream = currentStream(device);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
      streams_.push_back(stream);
    }
  }
}

void Keeper::joinStreams() {
  for (const c10::Stream& stream : streams_) {
    orderAfter(currentStream(stream.device()), stream);
  }
}

void Keeper::putNeeded(std::vector<c10::intrusive_ptr<Value>> values) {
  if (!values.empty()) {
    joinStreams();
  }
  for (c10::intrusive_ptr<Value>& value : values) {
    const bool needed = value->uses().handles() > 0 || value->uses().readers() > 0;
    if (needed && value->decision().isDue() && value->home().bytes() &&
        storeOf(value->decision().chosen())->isReady(*value) &&
        (value->home().isPrivate() || value->versions().areUnmoved()) &&
        !isInTransit(value->home().bytes())) {
      const c10::Storage storage = value->home().bytes();
      put(*value, storage);
    }
    value.reset();
  }
}

bool Keeper::storesInput(const at::Tensor& tensor) const {
  return context_.decider->inputs() != Decision::Save && isActivation(tensor);
}

void Keeper::keep(Value& value, const at::Tensor& tensor, bool handlesRely) {
  const bool due =
      value.decision().isDue() && storeOf(value.decision().chosen())->accepts(value, tensor);
  value.keep(tensor.storage(), due, handlesRely);
  if (due) {
    noteStream(tensor.device());
  }
  keptBytes_ += value.home().nbytes();
  if (!value.decision().isSaved() && !value.facts().inTransit) {
    takeFingerprint(value);
  }
}

void Keeper::takeFingerprint(Value& value) {
  value.watch(fingerprint(value.home().bytes(), context_.graph->rules.fingerprints()));
}

void Keeper::watchEscaped(Value& value) {
  const c10::Storage storage = value.home().living();
  const bool isCompared = context_.graph->rules.compareAll;
  if (storage && !value.home().isPrivate() && !isCompared && value.versions().areUnmoved()) {
    value.watch(fingerprint(storage));
  }
}

void Keeper::clear() {
  streams_.clear();
  keptBytes_ = 0;
  for (Store* store : used_) {
    store->regionEnds();
  }
  used_.clear();
}

}  // namespace ebb
