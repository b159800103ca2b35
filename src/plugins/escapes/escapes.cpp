#include "plugins/escapes/escapes.h"

#include <c10/core/Storage.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "graph/recipe.h"
#include "hooks/observer.h"
#include "record/recorder.h"
#include "region/enter_region.h"
#include "replay/replay.h"
#include "stores/share_storage.h"

namespace ebb {
namespace {

struct Escape {
  c10::intrusive_ptr<Value> value;
  c10::Storage storage;  // emptied when the region ended
  const std::string* op;
};

// Holders of an escape may read it after the capture too: see Note [Bytes of a capture].
void checkPlace(Graph& graph, const Escape& escape) {
  graph.streams.findPlace();
  TORCH_CHECK(
      !graph.streams.isElsewhere() && graph.streams.mayUse(*escape.value), "ebb: an output of ",
      *escape.op, " was read before it was restored: region '", graph.names.front(),
      "' has escapes='placeholder', and its backward ran in another CUDA graph capture. Capture "
      "forward and backward together, or use escapes='keep'.");
}

// Refills the escapes of one graph.
class Escapes final : public BackwardEvents {
 public:
  // The escape has been emptied. The caller holds the graph's lock.
  void add(Escape escape) { emptied_.push_back(std::move(escape)); }

  void unpacks(Graph& graph) override {
    if (any_.load(std::memory_order_relaxed)) {
      refill(ReplayLock(graph));
    }
  }

 private:
  // Refills all emptied escapes.
  void refill(const ReplayLock& locked) {
    Graph& graph = locked.graph();
    auto emptied = std::exchange(emptied_, {});
    while (!emptied.empty()) {
      Escape escape = std::move(emptied.back());
      emptied.pop_back();
      Value& value = *escape.value;
      c10::Storage bytes;
      try {
        checkPlace(graph, escape);
        bytes = materialise(locked, value);
      } catch (const c10::Error& error) {
        // Backward may not need the value; code that reads it gets the error. The next unpack tries
        // again, because a missing input may be available then, such as a parameter that is
        // gathered later.
        emptyStorage(escape.storage, error.what_without_backtrace());
        emptied_.push_back(std::move(escape));
        continue;
      } catch (...) {  // from Python, perhaps an interrupt
        std::move(emptied.begin(), emptied.end(), std::back_inserter(emptied_));
        emptied_.push_back(std::move(escape));
        throw;
      }
      graph.streams.use(value, bytes);
      graph.streams.share(bytes);  // holders of the escape read it without waiting
      fillStorage(escape.storage, bytes);
      // The value refers to this storage from now on. Other code can write to the storage, so ebb
      // checks its version.
      value.restore(escape.storage, false);
    }
    any_.store(!emptied_.empty(), std::memory_order_relaxed);
  }

  std::vector<Escape> emptied_;  // to be refilled; the graph's lock guards them
  std::atomic<bool> any_{true};  // `emptied_` is not empty
};

// Empties the storage that holds `value`. `name` is the name of the region.
Escape emptied(
    const c10::intrusive_ptr<Value>& value, c10::Storage storage, const std::string& name) {
  emptyStorage(
      storage,
      c10::str(
          "ebb: an output of ", value->recipe()->op.name, " (", value->home().nbytes(),
          " bytes) was read before backward restored it: region '", name,
          "' has escapes='placeholder' and freed it at its end. Return it from the region or name "
          "it with region.returns(), read it inside the region, or use escapes='keep'."));
  return {value, std::move(storage), &value->recipe()->op.name};
}

// True if the storage of a value may be emptied, unless the storage is a result of the region.
bool mayBeEmptied(const Value& value, const c10::Storage& storage, bool onlyResults) {
  const bool wasRead = value.uses().readers() > 0;
  return storage && storage.resizable() && storage.nbytes() > 0 && value.versions().areCounted() &&
         value.recipe()->kernel.gradMode && (onlyResults || wasRead);
}

bool isAmong(const std::vector<at::Tensor>& results, const c10::Storage& storage) {
  return std::any_of(results.begin(), results.end(), [&](const at::Tensor& result) {
    return result.has_storage() && result.storage().is_alias_of(storage);
  });
}

// Empties the escapes of the open region, as leaveRegionEmptyingEscapes() does.
c10::intrusive_ptr<Graph> emptyEscapes(
    Recorder& recorder, const std::vector<at::Tensor>& results, bool onlyResults,
    bool hasBackward) {
  const auto graph = recorder.context().graph;
  if (graph->hasUnpacked) {
    return {};  // an escape may be a gradient
  }
  std::lock_guard<PythonMutex> lock(graph->mutex);
  const ValueMap::Map& values = recorder.values().applyDeferred().all();
  const auto hasHandle = [](const auto& entry) { return entry.second->uses().handles() > 0; };
  if (!hasBackward && std::none_of(values.begin(), values.end(), hasHandle)) {
    return {};
  }
  if (graph->rules.sameOnAllRanks) {
    return {};  // ranks may have different escapes, and would refill them at different times
  }
  Escapes* escapes = nullptr;
  for (const auto& [address, value] : values) {
    c10::Storage storage = escapedStorage(*value);
    if (mayBeEmptied(*value, storage, onlyResults) && !isAmong(results, storage)) {
      if (escapes == nullptr) {
        auto observer = std::make_unique<Escapes>();
        escapes = observer.get();
        graph->observers.add(std::move(observer));
      }
      escapes->add(emptied(value, std::move(storage), recorder.context().regionName()));
    }
  }
  return escapes != nullptr ? graph : c10::intrusive_ptr<Graph>();
}

}  // namespace

c10::intrusive_ptr<Graph> leaveRegionEmptyingEscapes(
    uint64_t id, const std::vector<at::Tensor>& results, bool onlyResults, bool hasBackward) {
  c10::intrusive_ptr<Graph> graph;
  try {
    if (Recorder* recorder = recorderThatEndsWith(id)) {
      graph = emptyEscapes(*recorder, results, onlyResults, hasBackward);
    }
  } catch (...) {
    leaveRegion(id);
    throw;
  }
  leaveRegion(id);
  return graph;
}

}  // namespace ebb
