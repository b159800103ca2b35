#include "record/sender.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "graph/recipe.h"
#include "graph/rows.h"
#include "kernel/fingerprint.h"
#include "memory/relief.h"
#include "offload/offload_engine.h"
#include "paging/paging_engine.h"
#include "record/notes.h"
#include "report/statistics.h"
#include "stream/stream.h"

namespace ebb {
// Note [Offloaded values]
// ebb sends an offloaded value when autograd packs the value. A value read only by recipes stays on
// the device first, since most recipes are never needed. When the region ends, ebb sends such a
// value if a handle needs it. A sweep of the map decides as if the region ended at that time. ebb
// treats a value in the same way if all packs and recipes show the same small slice. Then only the
// slice is sent, see Note [Saved slices]. After sending, a stash stands for the bytes, and the
// value needs no recipe. A visible write waits for the copy, so the stash surely holds the state
// before the write (isPrivate). After an unseen write the version has moved, and reading the old
// state raises, as for a leaf. If no host memory is left, ebb recomputes the value, or keeps a
// value without a recipe. A value with the decision PAGE goes to a page pool in the same way, but
// never as a slice. If the value has no rows (Note [Rows]) when autograd packs it, ebb keeps the
// value.
void Sender::send(Value& value, const c10::Storage& storage) {
  value.due = false;
  // False if other code resized the storage: there is nothing to send.
  const bool whole = storage.nbytes() == value.nbytes;
  if (whole && (value.isPaged() ? sendToPages(value, storage) : sendToHost(value, storage))) {
    return;
  }
  value.slice.reset();
  context_.counters->bytesFellBack += value.nbytes;
  Entry::update(value.entry, [](Line& line) {
    line.reason = "no pinned host memory was left for OFFLOAD (pinned_limit)";
  });
  if (value.recipe) {
    value.bytes = c10::Storage();
  }
  value.undoDecision();
}

bool Sender::sendToHost(Value& value, const c10::Storage& storage) {
  RECORD_USER_SCOPE("ebb::offload");
  const size_t nbytes = value.slice ? value.slice->nbytes() : value.nbytes;
  static const std::string kInput = "input";
  if (value.slice) {
    context_.graph->streams.use(value, storage);  // the storage is released after the gather
  }
  const auto gather = [&] { return withRelief([&] { return value.slice->gather(storage); }); };
  const auto account =
      statisticsTransfers(context_.regionName(), value.recipe ? value.recipe->op.name : kInput);
  auto stash = offloadEngine().send(value.slice ? gather() : storage, nbytes, account);
  if (!stash) {
    return false;
  }
  value.send(std::move(stash));
  context_.counters->bytesOffloaded += nbytes;
  noteSent(value, Fate::Offloaded, "offload", account->of, nbytes);
  return true;
}

bool Sender::sendToPages(Value& value, const c10::Storage& storage) {
  RECORD_USER_SCOPE("ebb::stash");
  if (!context_.graph->pages) {
    context_.graph->pages = std::make_shared<PageGroup>(context_.graph->names.front());
  }
  const Rows& rows = *value.rows;
  const char* op = value.recipe ? value.recipe->op.name.c_str() : "an input";
  const bool verify = context_.graph->verify == VerifyMode::Raise;
  value.send(
      Paging::get().send(
          {storage, rows.dtype, rows.live->kept, rows.total, op, verify}, context_.graph->pages));
  if (context_.graph->pages->resident) {
    context_.counters->bytesSaved += value.nbytes;
    context_.counters->bytesPacked += value.nbytes;
    Entry::update(value.entry, [](Line& line) { line.fate = Fate::Saved; });
    return true;
  }
  context_.counters->bytesPaged += value.nbytes;
  noteSent(value, Fate::Paged, "stash", op, value.nbytes);
  return true;
}

bool Sender::canLeave(const Value& value, const at::Tensor& tensor) {
  return value.isPaged() ? value.rows != nullptr && Paging::takes(tensor.device())
                         : offloadEngine().takes(tensor);
}

void Sender::sendOrWait(Value& value, const at::Tensor& tensor) {
  if (!value.bytes && !value.isPaged()) {
    if (auto slice = SavedSlice::ofSmall(tensor)) {
      keep(value, tensor);
      value.slice = std::move(slice);
    }
  }
  if (!value.slice) {
    send(value, tensor.storage());
  }
}

[[gnu::cold]] void Sender::needAll(Value& value, const at::Tensor& tensor) {
  value.slice.reset();
  if (value.stash) {
    value.stash.reset();
    value.due = true;
    keep(value, tensor);
  }
}

// Note [What is done later]
// At a sweep of the map and at the end of the region, ebb sends values read only by recipes, and
// copies small state. Both run on the current stream, perhaps not ordered after the stream of the
// bytes. So ebb remembers the streams of such values and waits for them.
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
    const bool needed = value->handles > 0 || value->recipeReaders() > 0;
    const bool known = !value->isPaged() || value->rows;
    if (needed && known && value->due && value->bytes &&
        (value->isPrivate || value->versionHolds())) {
      const c10::Storage storage = value->bytes;
      send(*value, storage);
    }
    value.reset();
  }
}

bool Sender::offloadsInput(const at::Tensor& tensor) const {
  return context_.decider->inputs() != Decision::Save && tensor.requires_grad() &&
         !tensor.is_leaf() && !(tensor.is_view() && tensor._base().is_leaf());
}

void Sender::keep(Value& value, const at::Tensor& tensor) {
  if (!value.isPaged()) {
    value.due = value.due && canLeave(value, tensor);  // rows may be marked later
  }
  value.bytes = tensor.storage();
  if (value.due) {
    noteStream(tensor.device());
  }
  keptBytes_ += value.nbytes;
  if (!value.isSaved()) {
    value.recipe.reset();
    if (!value.underWay) {
      takeFingerprint(value);
    }
  }
}

void Sender::takeFingerprint(Value& value) {
  const bool verify = context_.graph->verify != VerifyMode::Off;
  value.fingerprint =
      fingerprint(value.bytes, verify ? FingerprintOf::Everything : FingerprintOf::Samples);
}

void Sender::watchEscaped(Value& value) {
  const c10::Storage storage = value.living();
  const bool compared = context_.graph->verify != VerifyMode::Off;  // all bytes
  if (storage && !value.isPrivate && !compared && value.versionHolds()) {
    value.fingerprint = fingerprint(storage);
  }
}

void Sender::clear() {
  streams_.clear();
  keptBytes_ = 0;
}

}  // namespace ebb
