// Runs one recipe again.
#pragma once

#include <ATen/core/stack.h>

#include "graph/graph.h"
#include "graph/recipe.h"
#include "replay/transient_values.h"

namespace ebb {

// Runs `recipe` and gives bytes to its referenced results; `transient` says for how long. `stack`
// is empty; its memory is reused. `ahead`: backward does not need the results yet; a failed run
// leaves all values unchanged. Throws an error with op, region and fix if the run cannot be the
// same as in the forward.
void rerun(
    Graph& graph, Recipe& recipe, torch::jit::Stack& stack, TransientValues& transient, bool ahead);

}  // namespace ebb
