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
  void add(const c10::intrusive_ptr<Value>& value, const c10::intrusive_ptr<Graph>& graph);

  bool any() const { return !all_.empty(); }
  // Also frees the table, since the time of a loop over it does not shrink.
  void clear() { decltype(all_)().swap(all_); }

  // Called before a write to `tensor`. The caller holds no graph's lock.
  void beforeWrite(const at::Tensor& tensor, const Context& context);

  // The program empties `storage`, and restores the contents of leaves before backward.
  void storageEmptied(const c10::StorageImpl* storage);

 private:
  struct Needed {
    c10::weak_intrusive_ptr<Value> value;
    WeakGraph graph;
  };

  ska::flat_hash_map<const c10::StorageImpl*, c10::SmallVector<Needed, 1>> all_;
  size_t sweepAt_ = 64;  // size at which dead entries are removed
};

}  // namespace ebb
