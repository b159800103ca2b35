#include "replay/escapes.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "graph/recipe.h"
#include "memory/share_storage.h"
#include "replay/replay.h"
#include "support/python_support.h"

namespace ebb {
namespace {

// Refills all emptied escapes. The caller holds the graph's lock, and does not hold the GIL.
void fillAll(Graph& graph) {
  auto emptied = std::exchange(graph.escapes.all, {});
  while (!emptied.empty()) {
    Escaped escaped = std::move(emptied.back());
    emptied.pop_back();
    Value& value = *escaped.value;
    c10::Storage bytes;
    try {
      bytes = materialise(graph, value);
    } catch (const c10::Error& error) {
      // Backward may not need the value; code that reads it gets the error. The next unpack tries
      // again, because a missing input may be available then, such as a parameter that is gathered
      // later.
      emptyStorage(escaped.storage, error.what_without_backtrace());
      graph.escapes.all.push_back(std::move(escaped));
      continue;
    } catch (...) {  // from Python, perhaps an interrupt
      std::move(emptied.begin(), emptied.end(), std::back_inserter(graph.escapes.all));
      graph.escapes.all.push_back(std::move(escaped));
      throw;
    }
    graph.streams.use(value, bytes);
    graph.streams.share(bytes);  // holders of the escape read it without waiting
    fillStorage(escaped.storage, bytes);
    // The value refers to this storage from now on. Other code can write to the storage, so ebb
    // checks its version.
    value.home.share(escaped.storage);
  }
  graph.escapes.any.store(!graph.escapes.all.empty(), std::memory_order_relaxed);
}

}  // namespace

Escaped emptyEscaped(
    const c10::intrusive_ptr<Value>& value, c10::Storage storage, const std::string& name) {
  emptyStorage(
      storage,
      c10::str(
          "ebb: an output of ",
          value->recipe()->op.name,
          " (",
          value->home.nbytes(),
          " bytes) was read before backward restored it: region '",
          name,
          "' has escapes='placeholder' and freed it at its end. Return it from the region or name "
          "it with region.returns(), read it inside the region, or use escapes='keep'."));
  return {value, std::move(storage)};
}

void refill(Graph& graph) {
  if (graph.escapes.any.load(std::memory_order_relaxed)) {
    WithoutGil withoutGil;
    std::lock_guard<PythonMutex> lock(graph.mutex);
    fillAll(graph);
  }
}

}  // namespace ebb
