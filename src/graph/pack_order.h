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
// ebb does not know the node of a packed tensor. But autograd packs the inputs of an operator just
// before ebb records the operator, and the results just after. A custom autograd function packs all
// of its tensors at once. So if autograd packed an input after n recorded operators, it packed the
// results that read the input after n or n + 1 operators. Some of these values may belong to a
// neighbouring node. ebb recomputes those, too, if they read the input: a copy would take memory as
// well.
class PackOrder {
 public:
  // Autograd has packed `value`, to be recomputed, after `ops` recorded operators.
  void add(const c10::intrusive_ptr<Value>& value, uint64_t ops);

  // The living values that the node of an input packed after `ops` operators may have saved.
  c10::SmallVector<c10::intrusive_ptr<Value>, 4> near(uint64_t ops) const;

 private:
  struct Packed {
    c10::weak_intrusive_ptr<Value> value;
    uint64_t ops;
  };

  static constexpr size_t kFewest = 256;
  std::vector<Packed> packed_;  // sorted by `ops`; some values are dead
  size_t fullAt_ = kFewest;     // size at which dead values are removed
};

}  // namespace ebb
