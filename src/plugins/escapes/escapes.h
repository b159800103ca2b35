// Leaves regions, frees the memory of escapes and refills it: see Note [Escapes].
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <vector>

#include "ebb/export.h"
#include "graph/graph.h"

namespace ebb {

// Note [Escapes]
// A module attribute or the ctx of an autograd function can keep the bytes of a recomputable value.
// With escapes="placeholder", ebb empties the storage when the outermost region ends. Reading an
// empty storage is an error whose message names the fix. ebb refills the storage by sharing the
// recomputed memory, at the earlier of two times: before a backward node of the region unpacks a
// saved tensor, or before the grad_fn of one of the region's results runs. Before that grad_fn, all
// hooks on the result's gradient have run; FSDP gathers parameters in such a hook. Results of the
// region must stay. Gradients of a backward inside the region must stay too: ebb does not empty
// values made with grad mode off, and empties nothing if a saved tensor was unpacked inside the
// region. If a with-block does not call region.returns(), ebb does not know the results, so every
// value that no recipe reads counts as a result.

// Leaves the region `id`, as leaveRegion() does. If the region is the outermost one, first empties
// escapes, except for the storages of `results`. If `onlyResults` is false, values that no op has
// read count as results too. `hasBackward`: a result has a grad_fn, which will refill the escapes.
// Empties nothing if `hasBackward` is false and there is no handle, since then no backward would
// refill the escapes. Returns the graph if there was an escape, else null.
EBB_API c10::intrusive_ptr<Graph> leaveRegionEmptyingEscapes(
    uint64_t id, const std::vector<at::Tensor>& results, bool onlyResults, bool hasBackward);

}  // namespace ebb
