// Runs one recipe again.
#pragma once

#include <ATen/core/stack.h>

#include "graph/graph.h"
#include "graph/recipe.h"
#include "replay/passing.h"

namespace ebb {

// The code that needs a replay.
enum class Asker : uint8_t {
  Backward,  // backward needs the result now
  // no code: the replay runs ahead; a failed run must leave all unchanged and is not reported
  Nobody,
};

// Runs `recipe` and gives bytes to its referenced results; `passing` says for how long. `stack` is
// empty; its memory is reused. Throws an error with op, region and fix if the run cannot be the
// same as in the forward.
void rerun(Graph& graph, Recipe& recipe, torch::jit::Stack& stack, Passing& passing, Asker asker);

}  // namespace ebb
