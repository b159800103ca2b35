// The values that autograd packed, in order.
#pragma once

#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "graph/value.h"

namespace ebb {

// Note [Saved by one node]
// A backward node often needs a large input and small results of its operator: layer norm the mean
// and the deviation, a loss the sum of its weights, a pool the indices. If the node unpacks the
// input first, the recipes of the results still read the input. A copy for the recipes would cost
// as much memory as the input. So ebb first recomputes the results, which the same node unpacks
// next anyway.
//
// Autograd numbers the nodes of a thread, and makes a node before it packs the node's tensors. So
// tensors that were packed before the same next number belong to one node.
class PackOrder {
 public:
  // Autograd has packed `value`, to be recomputed, for node number `node`.
  void add(const c10::intrusive_ptr<Value>& value, uint32_t node);

  // The living values that were packed for node number `node`.
  c10::SmallVector<c10::intrusive_ptr<Value>, 4> of(uint32_t node) const;

 private:
  struct Packed {
    c10::weak_intrusive_ptr<Value> value;
    uint32_t node;
  };

  static constexpr size_t kFewest = 256;
  std::vector<Packed> packed_;  // sorted by `node`; some values are dead
  size_t fullAt_ = kFewest;     // size at which dead values are removed
};

}  // namespace ebb
