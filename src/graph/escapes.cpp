#include "graph/escapes.h"

#include <c10/util/StringUtil.h>

#include "graph/recipe.h"
#include "graph/replay.h"
#include "residency/share_storage.h"

namespace ebb {

Escaped emptyEscaped(
    const c10::intrusive_ptr<Value>& value, c10::Storage storage, const std::string& name) {
  emptyStorage(
      storage,
      c10::str(
          "ebb: an output of ",
          value->recipe->op.name,
          " (",
          value->nbytes,
          " bytes) was still referenced when region '",
          name,
          "' ended, which has escapes='placeholder': its memory was given up and comes back in the "
          "region's backward. Return it from the region or name it with region.returns(), read it "
          "inside the region, or use escapes='keep'."));
  return {value, std::move(storage)};
}

void refillEscapes(Graph& graph) {
  while (!graph.escapes.empty()) {
    const Escaped escaped = std::move(graph.escapes.back());
    graph.escapes.pop_back();
    Value& value = *escaped.value;
    c10::Storage bytes;
    try {
      bytes = materialise(graph, value);
    } catch (const c10::Error& error) {
      // Backward may not need it; whoever does gets the error.
      emptyStorage(escaped.storage, error.what_without_backtrace());
      continue;
    }
    fillStorage(escaped.storage, bytes);
    // Others can write to it from now on, so it is the value's home again, and counts versions.
    value.bytes = escaped.storage;
    value.address = escaped.storage.data();
    value.isPrivate = false;
  }
  graph.hasEscapes.store(false, std::memory_order_relaxed);
}

}  // namespace ebb
