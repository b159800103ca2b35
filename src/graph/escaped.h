// Values that a region recomputes and that somebody outside holds when it ends.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include "graph/value.h"

namespace ebb {

// Note [Escapes]
// A module attribute or a field of a ctx keeps the bytes of a value that the region could compute
// again. Where the user wants that memory back, the storage is emptied when the outermost region
// ends and filled again, by sharing the recomputed memory, before any function of its backward
// unpacks something, or before the function that made one of its results runs, after the hooks on
// that one's gradient: FSDP gathers parameters in such a hook. Meanwhile reading it is an error
// with the fix. What the region returns must stay, and so must gradients of a backward inside it,
// which computes without grad mode, or unpacks something; in a block of code, of which nobody says
// what it returns, that is also what no op of the region has read.
struct Escaped {
  c10::intrusive_ptr<Value> value;
  c10::Storage storage;  // emptied
};

}  // namespace ebb
