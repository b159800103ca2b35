// Recomputes the results of a backward node before the node's input is handed out.
#pragma once

#include <cstdint>

#include "graph/value.h"
#include "replay/replay_lock.h"

namespace ebb {

// Materialises the values that read `input` and that were packed for the same backward node, number
// `node`. A replay that fails is not an error here: the node raises the error when it unpacks the
// value itself. Values of RECOMPUTE_EACH_TIME are left alone. See Note [Saved by one node].
void materialiseSameNode(const ReplayLock& locked, const Value& input, uint32_t node);

}  // namespace ebb
