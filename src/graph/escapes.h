// Values that a region recomputes and that somebody outside holds when it ends.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "graph/value.h"

namespace ebb {

// Note [Escapes]
// A module attribute or a field of a ctx keeps the bytes of a value that the region could compute
// again. Where the user wants that memory back, the storage is emptied when the outermost region
// ends and filled again, by sharing the recomputed memory, before any function of its backward
// unpacks something, or when the gradient of one of its results arrives. Meanwhile reading it is an
// error with the fix. What the region returns must stay; in a block of code, of which nobody says
// what it returns, that is also what no op of the region has read.
struct Escaped {
  c10::intrusive_ptr<Value> value;
  c10::Storage storage;  // emptied
};

// Empties the storage that holds `value`. `name` is the region's.
Escaped emptyEscaped(
    const c10::intrusive_ptr<Value>& value, c10::Storage storage, const std::string& name);

// Fills all that were emptied. Under the graph's lock, without the GIL.
void refillEscapes(Graph& graph);

}  // namespace ebb
