// Which graph made what a region reads: see Note [Replays ahead of backward].
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/flat_hash_map.h>

#include "graph/graph.h"
#include "graph/lookahead.h"
#include "record/value_map.h"

namespace ebb {

// Storages that regions of one thread have left behind, and their graphs. Storages are compared,
// not held: another one in the same place is taken for it, and a region that backward does not
// reach next is replayed.
class Results {
 public:
  // What `graph` made and somebody else holds.
  void add(const ValueMap& values, const c10::intrusive_ptr<Graph>& graph);

  // The graph that made what `tensor` shows; expired if none did.
  WeakGraph madeBy(const at::Tensor& tensor) const;

 private:
  struct Made {
    const void* address;  // of its bytes
    WeakGraph by;
  };

  void forgetDead();

  ska::flat_hash_map<const c10::StorageImpl*, Made> all_;
  size_t sweepAt_ = 64;  // its size at which the dead are forgotten
};

}  // namespace ebb
