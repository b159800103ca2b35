// Recomputable values that the program still references when a region ends.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <vector>

#include "graph/value.h"

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
struct Escaped {
  c10::intrusive_ptr<Value> value;
  c10::Storage storage;  // emptied when the region ended
};

// The escapes of one graph.
struct Escapes {
  std::vector<Escaped> all;      // to be refilled
  std::atomic<bool> any{false};  // `all` is not empty
  bool hadBackward = false;      // the thread unpacked a saved tensor while the region was open
};

}  // namespace ebb
