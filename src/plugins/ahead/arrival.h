// Replays ahead of backward: functions for tests.
#pragma once

#include <ATen/core/TensorBody.h>

#include <memory>

#include "ebb/ahead.h"
#include "graph/graph.h"
#include "plugins/ahead/lookahead.h"

namespace ebb {

// For tests: if `on`, a worker replays each graph as soon as recording has ended, while the program
// goes on.
EBB_API void replayWhenClosed(bool on);
// For tests: true if no worker has anything left to do.
EBB_API bool replaysAheadAreIdle();

}  // namespace ebb
