// What the recorder does with values whose decision is OFFLOAD or PAGE.
#include <ATen/record_function.h>

#include <algorithm>
#include <utility>

#include "graph/recorder.h"
#include "residency/offload.h"
#include "residency/paging.h"

namespace ebb {

// Note [Offloaded values]
// A value that the policy offloads is sent when autograd packs it. What only recipes read is kept
// on the device first, since most recipes are needed by nothing: it is sent when the map is swept,
// or when the region ends and a handle needs it. So is a value of which all packs and recipes show
// the same small part; then that part is sent alone, see Note [Parts of a storage]. A stash then
// stands for the bytes, and the value needs no recipe. A write that ebb sees waits for the copy, so
// the stash holds the state before it for sure (isPrivate). After a write that ebb does not see the
// version has moved, and who needs the old state raises, as for a leaf. If there is no host memory
// left, the value is recomputed, or kept if it has no recipe.
// A value that the policy pages goes the same ways, to a page pool and whole, if it has rows; see
// Note [Rows]. If it has none when autograd packs it, it is kept.
void Recorder::send(Value& value, const c10::Storage& storage) {
  value.offload = false;
  // Else somebody resized it: there is nothing to send.
  const bool whole = storage.nbytes() == value.nbytes;
  if (whole && (value.paged ? sendToPages(value, storage) : sendToHost(value, storage))) {
    value.bytes = c10::Storage();
    value.recipe.reset();
    return;
  }
  value.part.reset();
  counters_->bytesFellBack += value.nbytes;
  if (value.entry) {
    value.entry->update([](Line& line) { line.reason = "no host memory was left to offload it"; });
  }
  if (value.recipe) {
    value.bytes = c10::Storage();
    value.keep = value.saved = false;
  }
}

bool Recorder::sendToHost(Value& value, const c10::Storage& storage) {
  RECORD_USER_SCOPE("ebb::offload");
  const size_t nbytes = value.part ? value.part->nbytes() : value.nbytes;
  static const std::string kInput = "input";
  const auto account =
      ledgerTransfers(graph_->names[region_], value.recipe ? value.recipe->op.name : kInput);
  value.stash =
      Offload::get().send(value.part ? value.part->gather(storage) : storage, nbytes, account);
  if (!value.stash) {
    return false;
  }
  counters_->bytesOffloaded += nbytes;
  if (value.entry) {
    noteSent(value, Fate::Offloaded, "offload", account->of, nbytes);
  }
  return true;
}

bool Recorder::sendToPages(Value& value, const c10::Storage& storage) {
  RECORD_USER_SCOPE("ebb::stash");
  if (!graph_->pages) {
    graph_->pages = std::make_shared<PageGroup>(graph_->names.front());
  }
  const Rows& rows = *value.rows;
  const char* op = value.recipe ? value.recipe->op.name.c_str() : "an input";
  const bool verify = graph_->verify == VerifyMode::Raise;
  value.stash = Paging::get().send(
      {storage, rows.dtype, rows.live->kept, rows.most, op, verify}, graph_->pages);
  if (graph_->pages->resident) {
    counters_->bytesSaved += value.nbytes;
    if (value.entry) {
      value.entry->update([](Line& line) { line.fate = Fate::Saved; });
    }
    return true;
  }
  counters_->bytesPaged += value.nbytes;
  if (value.entry) {
    noteSent(value, Fate::Paged, "stash", op, value.nbytes);
  }
  return true;
}

// Whether the value, which `tensor` shows, may be sent where it is to go.
bool Recorder::canLeave(const Value& value, const at::Tensor& tensor) {
  return value.paged ? value.rows != nullptr && Paging::takes(tensor.device())
                     : Offload::get().takes(tensor);
}

// Autograd packs `tensor`, which shows the value. A small part may be all that is ever needed, so
// it waits, as what only recipes read does.
void Recorder::sendOrWait(Value& value, const at::Tensor& tensor) {
  if (!value.bytes && !value.paged) {
    if (auto part = Part::ofSmall(tensor)) {
      keep(value, tensor);
      value.part = std::move(part);
    }
  }
  if (!value.part) {
    send(value, tensor.storage());
  }
}

// `tensor` shows more of the value than the part that its stash has, or is to have.
[[gnu::cold]] void Recorder::needAll(Value& value, const at::Tensor& tensor) {
  value.part.reset();
  if (value.stash) {
    value.stash.reset();
    value.offload = value.keep = true;
    keep(value, tensor);
  }
}

// `ownReferences` are those that need nothing. Consumers come before what they consume, and those
// that nothing needs are let go at once, and with them what only they need.
void Recorder::sendKept(std::vector<c10::intrusive_ptr<Value>> values, size_t ownReferences) {
  for (c10::intrusive_ptr<Value>& value : values) {
    const bool needed = value.use_count() > ownReferences;
    const bool known = !value->paged || value->rows;
    if (needed && known && value->offload && value->bytes &&
        (value->isPrivate || value->versionHolds())) {
      const c10::Storage storage = value->bytes;
      send(*value, storage);
    }
    value.reset();
  }
}

// What another autograd function computed: no parameter, and no view of one.
bool Recorder::offloadsInput(const at::Tensor& tensor) const {
  return decider_->inputs() != Decision::Save && tensor.requires_grad() && !tensor.is_leaf() &&
         !(tensor.is_view() && tensor._base().is_leaf());
}

// Values that are to be offloaded and have not been sent, latest first.
std::vector<c10::intrusive_ptr<Value>> Recorder::keptToSend() const {
  std::vector<c10::intrusive_ptr<Value>> found;
  for (const auto& [storage, value] : values_) {
    if (value->offload && value->bytes) {
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
