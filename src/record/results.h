// State left by ended regions of a thread for later regions.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <string>

#include "ebb/report.h"
#include "graph/graph.h"
#include "graph/lookahead.h"
#include "graph/value.h"
#include "intercept/interceptor.h"

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

  void add(const c10::VariableVersion& counter, const c10::intrusive_ptr<Graph>& graph);
  void forgetDead();

  ska::flat_hash_map<const void*, Made> all_;  // by the counter's identity
  size_t sweepAt_ = 64;                        // size at which dead entries are removed
};

// Graphs that read results of regions. A later region may write to such results: see Note [Results
// that are written later].
class ReadResults {
 public:
  // Recipes of `graph`, whose region has ended, read `leaf`. The program owns the leaf's bytes too.
  void add(const c10::intrusive_ptr<Value>& leaf, const c10::intrusive_ptr<Graph>& graph);

  bool any() const {
    return !all_.empty();
  }

  // Called before an operator that writes. The caller holds no graph's lock.
  void beforeCall(const Call& call, RegionCounters& counters);

  // Called before a write to `tensor`. The caller holds no graph's lock.
  void beforeWrite(const at::Tensor& tensor, RegionCounters& counters);

 private:
  struct Reader {
    c10::weak_intrusive_ptr<Value> leaf;
    WeakGraph graph;
  };
  using Readers = c10::SmallVector<Reader, 1>;

  static void forgetDead(Readers& readers);
  void forgetDead();

  ska::flat_hash_map<const c10::StorageImpl*, Readers> all_;
  size_t sweepAt_ = 64;  // size at which dead entries are removed
};

// Storages that the earlier parts of an open region need for their recomputation: see Note [Writes
// in a later part].
class EarlierParts {
 public:
  // The part recorded in `graph` has ended. Adds the storage of `value`, if the part needs it.
  void add(const c10::intrusive_ptr<Value>& value, const c10::intrusive_ptr<Graph>& graph);

  bool any() const {
    return !all_.empty();
  }

  // Throws if the operator writes to a storage that an earlier part needs, and the write moves no
  // version counter known to that part. `region`: for the message.
  void beforeCall(const Call& call, const std::string& region) const;
  // Throws if an earlier part needs the storage of `tensor`, unless the write is `counted` (moves
  // the tensor's version) and the part knows the tensor's counter.
  void beforeWrite(
      const at::Tensor& tensor,
      bool counted,
      const std::string& op,
      const std::string& region) const;

  // The program empties `storage`, and will restore the contents for backward. `splits`: the part
  // ends before the next op.
  void storageEmptied(const c10::StorageImpl* storage, bool splits);

  // A part has ended, and the region too unless `onlyPart`.
  void ended(bool onlyPart);

 private:
  struct Needed {
    c10::weak_intrusive_ptr<Value> value;
    WeakGraph graph;
  };

  ska::flat_hash_map<const c10::StorageImpl*, c10::SmallVector<Needed, 1>> all_;
  c10::SmallVector<const c10::StorageImpl*, 1> emptied_;  // storages whose emptying ends the part
};

}  // namespace ebb
