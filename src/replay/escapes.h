// Frees the memory of escapes and refills it: see Note [Escapes].
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <string>

#include "graph/graph.h"

namespace ebb {

// Empties the storage that holds `value`. `name` is the name of the region.
Escaped emptyEscaped(
    const c10::intrusive_ptr<Value>& value, c10::Storage storage, const std::string& name);

// Refills the emptied storages of the graph, if any.
EBB_API void refill(Graph& graph);

}  // namespace ebb
