// State left by ended regions of a thread for later regions.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include "graph/graph.h"
#include "graph/value.h"
#include "intercept/interceptor.h"
#include "record/context.h"

namespace ebb {

// Maps the results of regions to their graphs. A result is identified by its version counter. The
// map holds the counter, so no other tensor is mistaken for the result.
class Results {
 public:
  // `graph` made `value`, and the graph's region has ended.
  void add(const Value& value, const c10::intrusive_ptr<Graph>& graph);

  // The graph that made the contents of `tensor`; may be gone. Null if unknown.
  const WeakGraph* madeBy(const at::Tensor& tensor) const;

 private:
  struct Made {
    c10::VariableVersion counter;
    WeakGraph by;
  };

  ska::flat_hash_map<const void*, Made> all_;  // by the counter's identity
  size_t sweepAt_ = 64;                        // size at which dead entries are removed
};

// Storages whose contents ended graphs need for backward, and to which a later op of the thread may
// write: see Note [Results that are written later] and Note [Writes in a later part].
class EarlierNeeds {
 public:
  // The region of `graph`, or a part of it, has ended. Backward needs the contents of `value`.
  // `untilRegionEnds`: the entry ends with the open region. Later writes are then unseen.
  void add(
      const c10::intrusive_ptr<Value>& value, const c10::intrusive_ptr<Graph>& graph,
      bool untilRegionEnds);

  bool any() const { return !all_.empty(); }

  // Called before an operator that writes. The caller holds no graph's lock.
  void beforeCall(const Call& call, const Context& context);

  // Called before a write to `tensor`. The caller holds no graph's lock.
  void beforeWrite(const at::Tensor& tensor, const Context& context);

  // The program empties `storage`. `splits`: the open part of the region ends before the next op.
  void storageEmptied(const c10::StorageImpl* storage, bool splits);

  // A part of the region has ended, and the region too unless `onlyPart`.
  void ended(bool onlyPart);

 private:
  struct Needed {
    c10::weak_intrusive_ptr<Value> value;
    WeakGraph graph;
    bool untilRegionEnds;
  };

  template <class IsOver>
  void forget(const IsOver& isOver);

  ska::flat_hash_map<const c10::StorageImpl*, c10::SmallVector<Needed, 1>> all_;
  c10::SmallVector<const c10::StorageImpl*, 1> emptied_;  // storages whose emptying ends the part
  size_t sweepAt_ = 64;                                   // size at which dead entries are removed
  bool hasParts_ = false;                                 // the open region has ended parts
};

}  // namespace ebb
