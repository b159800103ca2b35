// Giving up the memory of escapes, and filling it again: see Note [Escapes].
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <string>

#include "graph/escaped.h"
#include "graph/graph.h"

namespace ebb {

// Empties the storage that holds `value`. `name` is the region's.
Escaped emptyEscaped(
    const c10::intrusive_ptr<Value>& value, c10::Storage storage, const std::string& name);

// Fills again what was emptied of the graph, unless that has been done.
EBB_API void refill(Graph& graph);

}  // namespace ebb
