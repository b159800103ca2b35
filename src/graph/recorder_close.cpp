// What the recorder does when the outermost region ends.
#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "graph/escapes.h"
#include "graph/recorder.h"

namespace ebb {

// Note [State that each forward updates]
// A buffer that this region wrote (a spectral norm's vectors, a counter) will be written again by
// the next forward, perhaps in another region before this one's backward. If recipes read it and it
// is small it is copied when the region ends; a larger one (gathered parameters, a momentum
// encoder) is not, and writing it again before backward is an error.
bool Recorder::mustOutliveNextWrite(const c10::intrusive_ptr<Value>& value) {
  constexpr size_t kSmall = size_t{1} << 20;
  return value->writtenHere && value->bytes && !value->isPrivate && !value->recipe &&
         value->nbytes <= kSmall && readers(value) > 1;
}

void Recorder::close() {
  const auto forget = c10::make_scope_exit([this] {
    // Clearing takes as long as the table is large: one unusually long region must not slow all.
    if (values_.bucket_count() > 8 * (values_.size() + 8)) {
      Map().swap(values_);
    }
    values_.clear();
    unsettled_.clear();
    rowCounts_.clear();
    packedSince_.clear();
    graph_.reset();
  });
  std::lock_guard<std::recursive_mutex> lock(graph_->mutex);
  settle();
  for (const auto& entry : values_) {
    closeOwned(*entry.second);
  }
  for (const auto& entry : values_) {
    closeOthers(entry.second);
  }
  const auto closing = graph_->journal ? noteClosing() : std::vector<Closing>();
  if (auto toSend = keptToSend(); !toSend.empty()) {
    values_.clear();
    sendKept(std::move(toSend), 1);
  }
  if (!closing.empty()) {
    values_.clear();
    noteClosed(closing);
  }
}

// Whoever else holds the value, which can be made again. Null if nobody does.
c10::Storage Recorder::escapedStorage(const c10::intrusive_ptr<Value>& value) {
  if (!value->recipe || value->keep || value->opaque > 0 || value->home.expired() ||
      !value->versionHolds() || (value->rows && value->rows->lossy)) {
    return {};
  }
  return value->living();
}

void Recorder::emptyEscapes(
    const std::vector<at::Tensor>& results, bool onlyResults, bool hasBackward) {
  std::lock_guard<std::recursive_mutex> lock(graph_->mutex);
  settle();
  const auto hasHandle = [](const auto& entry) { return entry.second->handles > 0; };
  if (!hasBackward && std::none_of(values_.begin(), values_.end(), hasHandle)) {
    return;
  }
  const auto isResult = [&](const c10::Storage& storage) {
    return std::any_of(results.begin(), results.end(), [&](const at::Tensor& result) {
      return result.has_storage() && result.storage().is_alias_of(storage);
    });
  };
  for (const auto& entry : values_) {
    const auto& value = entry.second;
    const bool wasRead = readers(value) > 1;
    c10::Storage storage = escapedStorage(value);
    if (storage && storage.resizable() && storage.nbytes() > 0 && value->counter.enabled() &&
        (onlyResults || wasRead) && !isResult(storage)) {
      graph_->escapes.push_back(emptyEscaped(value, std::move(storage), graph_->names[region_]));
      graph_->hasEscapes.store(true, std::memory_order_relaxed);
    }
  }
}

// Values that need no recipe any more, see Note [Unpacked bytes may be written]. They come first:
// what only their recipes read need not be kept.
void Recorder::closeOwned(Value& value) {
  if (ownsItsBytes(value)) {
    value.isPrivate = true;
    dropRecipe(value);
  }
}

void Recorder::closeOthers(const c10::intrusive_ptr<Value>& held) {
  Value& value = *held;
  if (readers(held) > 1 && escapedStorage(held)) {
    counters_->bytesEscaped += value.nbytes;
  }
  if (value.recipe && !value.counter.enabled()) {
    value.home.reset();  // an inference tensor: a write to it would not be noticed any more
  }
  if (mustOutliveNextWrite(held)) {
    makePrivate(value);
  }
}

}  // namespace ebb
