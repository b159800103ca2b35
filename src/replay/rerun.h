// One recipe, run again.
#pragma once

#include <ATen/core/stack.h>

#include "graph/graph.h"
#include "graph/recipe.h"

namespace ebb {

// Runs `recipe`, and gives its results that are still referred to their bytes. `stack` is empty,
// and is given for its memory. Throws, naming op, region and fix, if the run cannot be the same as
// in the forward.
void rerun(Graph& graph, Recipe& recipe, torch::jit::Stack& stack);

}  // namespace ebb
