#include "record/sender.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "counts/statistics.h"
#include "graph/recipe.h"
#include "graph/rows.h"
#include "kernel/fingerprint.h"
#include "offload/offload_engine.h"
#include "paging/paging_engine.h"
#include "stream/stream.h"

namespace ebb {

bool isActivation(const at::Tensor& tensor) {
  return tensor.requires_grad() && !tensor.is_leaf() &&
         !(tensor.is_view() && tensor._base().is_leaf());
}

// Note [Offloaded values]
// ebb sends an offloaded value when autograd packs the value. A value read only by recipes at first
// stays on the device, since most recipes are never needed. When the region ends, ebb sends such a
// value if a handle needs it. A sweep of the recorder's map sends the values that ebb would send if
// the region ended at once. After sending, a stash stands for the bytes, and the value needs no
// recipe. A visible write waits for the copy, so the stash surely holds the state before the write
// (Home::isPrivate). After an unseen write the version has moved, and reading the old state raises,
// as for a leaf. If no host memory is left, ebb recomputes the value, or keeps a value without a
// recipe. A value with the decision PAGE goes to a page pool in the same way. If the value has no
// rows (Note [Rows]) when autograd packs it, ebb keeps the value.
void Sender::send(Value& value, const c10::Storage& storage) {
  value.decision.setDue(false);
  // False if other code resized the storage: there is nothing to send.
  const bool whole = storage.nbytes() == value.home.nbytes();
  if (whole &&
      (value.decision.isPaged() ? sendToPages(value, storage) : sendToHost(value, storage))) {
    return;
  }
  context_.counters->bytesFellBack += value.home.nbytes();
  context_.graph->observers.tell(
      &OpEvents::notSent, value, "no pinned host memory was left for OFFLOAD (pinned_limit)");
  // Perhaps only this rank lacks memory.
  const bool recomputes = value.recipe() && !context_.graph->rules.sameOnAllRanks;
  if (recomputes) {
    value.home.take();
  }
  value.decision.undo(recomputes);
}

bool Sender::sendToHost(Value& value, const c10::Storage& storage) {
  RECORD_USER_SCOPE("ebb::offload");
  const size_t nbytes = value.home.nbytes();
  static const std::string kInput = "input";
  const auto account =
      statisticsTransfers(context_.regionName(), value.recipe() ? value.recipe()->op.name : kInput);
  auto stash = offloadEngine().send(storage, nbytes, account);
  if (!stash) {
    return false;
  }
  value.send(std::move(stash));
  sendsToHost_ = true;
  context_.counters->bytesOffloaded += nbytes;
  context_.graph->observers.tell(&OpEvents::sent, value, "offload", account->of, nbytes);
  return true;
}

bool Sender::sendToPages(Value& value, const c10::Storage& storage) {
  RECORD_USER_SCOPE("ebb::stash");
  if (!context_.graph->pages) {
    context_.graph->pages = std::make_shared<PageGroup>(context_.graph->names.front());
  }
  const Rows& rows = *value.rare->rows;
  const char* op = value.recipe() ? value.recipe()->op.name.c_str() : "an input";
  const bool check = context_.graph->rules.raiseIfDifferent;
  value.send(
      Paging::get().send(
          {storage, rows.dtype, rows.live->kept, rows.total, op, check}, context_.graph->pages));
  if (context_.graph->pages->resident) {
    context_.counters->bytesSaved += value.home.nbytes();
    context_.counters->bytesPacked += value.home.nbytes();
    context_.graph->observers.tell(&OpEvents::stays, value, nullptr);
    return true;
  }
  rows.live->isPaged = true;
  context_.counters->bytesPaged += value.home.nbytes();
  context_.graph->observers.tell(&OpEvents::sent, value, "stash", op, value.home.nbytes());
  return true;
}

bool Sender::canLeave(const Value& value, const at::Tensor& tensor) {
  return value.decision.isPaged() ? value.rare->rows != nullptr && Paging::takes(tensor.device())
                                  : offloadEngine().takes(tensor);
}

// Note [What is done later]
// At a sweep of the map and at the end of the region, ebb sends values read only by recipes, and
// copies small state. Both use the current stream. Another stream may have to write the bytes, and
// may not have done so yet. So ebb remembers the streams of such values, and the current stream
// waits for these streams.
void Sender::noteStream(c10::Device device) {
  if (!device.is_cpu()) {
    const c10::Stream stream = currentStream(device);
    if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) {
      streams_.push_back(stream);
    }
  }
}

void Sender::joinStreams() {
  for (const c10::Stream& stream : streams_) {
    orderAfter(currentStream(stream.device()), stream);
  }
}

void Sender::sendKept(std::vector<c10::intrusive_ptr<Value>> values) {
  if (!values.empty()) {
    joinStreams();
  }
  for (c10::intrusive_ptr<Value>& value : values) {
    const bool needed = value->uses.handles() > 0 || value->uses.readers() > 0;
    const bool known = !value->decision.isPaged() || value->rare->rows;
    if (needed && known && value->decision.isDue() && value->home.bytes() &&
        (value->home.isPrivate() || value->versions.areUnmoved())) {
      const c10::Storage storage = value->home.bytes();
      send(*value, storage);
    }
    value.reset();
  }
}

bool Sender::offloadsInput(const at::Tensor& tensor) const {
  return context_.decider->inputs() != Decision::Save && isActivation(tensor);
}

void Sender::keep(Value& value, const at::Tensor& tensor) {
  if (!value.decision.isPaged()) {  // a paged value may get rows later
    value.decision.setDue(value.decision.isDue() && canLeave(value, tensor));
  }
  value.home.setBytes(tensor.storage(), false);
  if (value.decision.isDue()) {
    noteStream(tensor.device());
  }
  keptBytes_ += value.home.nbytes();
  if (!value.decision.isSaved()) {
    value.setRecipe({});
    if (!value.facts.collectiveRunning) {
      takeFingerprint(value);
    }
  }
}

void Sender::takeFingerprint(Value& value) {
  value.home.setFingerprint(fingerprint(value.home.bytes(), context_.graph->rules.fingerprints()));
}

void Sender::watchEscaped(Value& value) {
  const c10::Storage storage = value.home.living();
  const bool isCompared = context_.graph->rules.compareAll;
  if (storage && !value.home.isPrivate() && !isCompared && value.versions.areUnmoved()) {
    value.home.setFingerprint(fingerprint(storage));
  }
}

void Sender::clear() {
  streams_.clear();
  keptBytes_ = 0;
  if (std::exchange(sendsToHost_, false)) {
    offloadEngine().regionEnds();
  }
}

}  // namespace ebb
