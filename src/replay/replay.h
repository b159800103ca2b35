// Making values again from their recipes.
#pragma once

#include <c10/core/Storage.h>

#include "graph/graph.h"
#include "graph/value.h"

namespace ebb {

// The storage that holds `value`, replaying the fewest recipes that bring it back. The caller holds
// the graph's lock and not the GIL. Throws, naming op, region and fix, if a leaf that a recipe
// needs was written or freed after the region.
c10::Storage materialise(Graph& graph, Value& value);

}  // namespace ebb
