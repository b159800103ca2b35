// What the ended regions of a thread have left for those that come later.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include "ebb/report.h"
#include "graph/graph.h"
#include "graph/lookahead.h"
#include "graph/value.h"
#include "intercept/interceptor.h"

namespace ebb {

// Which graph made what a region reads. A tensor is known by its version counter, which is held: so
// no other tensor is ever taken for it.
class Results {
 public:
  // `graph` made `value`, and its region has ended.
  void add(const Value& value, const c10::intrusive_ptr<Graph>& graph);

  // The graph that made what `tensor` shows, which may be gone; null if none is known.
  const WeakGraph* madeBy(const at::Tensor& tensor) const;

 private:
  struct Made {
    c10::VariableVersion counter;
    WeakGraph by;
  };

  void add(const c10::VariableVersion& counter, const c10::intrusive_ptr<Graph>& graph);
  void forgetDead();

  ska::flat_hash_map<const void*, Made> all_;  // by the counter's identity
  size_t sweepAt_ = 64;                        // its size at which the dead are forgotten
};

// Which graphs read what a later region may write: see Note [Results that are written later].
class ReadResults {
 public:
  // Recipes of `graph`, whose region has ended, read `leaf`. Its bytes are the program's too.
  void add(const c10::intrusive_ptr<Value>& leaf, const c10::intrusive_ptr<Graph>& graph);

  bool any() const {
    return !all_.empty();
  }

  // An operator is about to write. No graph's lock may be held.
  void beforeCall(const Call& call, RegionCounters& counters);

  // `tensor` is about to be written. No graph's lock may be held.
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
  size_t sweepAt_ = 64;  // its size at which the dead are forgotten
};

}  // namespace ebb
