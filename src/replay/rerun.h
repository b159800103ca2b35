// One recipe, run again.
#pragma once

#include <ATen/core/stack.h>

#include "graph/graph.h"
#include "graph/recipe.h"
#include "replay/passing.h"

namespace ebb {

// Who wants a replay.
enum class Asker : uint8_t {
  Backward,  // which has to have it, now
  Nobody,    // it runs ahead: a run that fails must leave all as it was, and nobody hears of it
};

// Runs `recipe`, and gives its results that are still referred to their bytes; `passing` says for
// how long. `stack` is empty, and is given for its memory. Throws, naming op, region and fix, if
// the run cannot be the same as in the forward.
void rerun(
    Graph& graph,
    Recipe& recipe,
    torch::jit::Stack& stack,
    Passing& passing,
    Asker asker = Asker::Backward);

}  // namespace ebb
