// Which graph backward will reach next.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

#include "graph/graph.h"
#include "graph/lookahead.h"

namespace ebb {

// Graphs that come next, and those of them that have been replayed ahead. Weakly held.
class Upcoming {
 public:
  // Strong references that were taken on the way. They are to be dropped without a lock: a graph
  // may die with them.
  using Seen = std::vector<c10::intrusive_ptr<Graph>>;

  void add(c10::ArrayRef<WeakGraph> graphs) {
    candidates_.insert(candidates_.end(), graphs.begin(), graphs.end());
  }

  // Backward goes another way than was thought.
  void forgetAhead() {
    ahead_.clear();
  }

  // The latest that nothing has been done for, as autograd will choose; it counts as ahead from now
  // on. Null if there is none, or `most` are ahead already.
  c10::intrusive_ptr<Graph> take(size_t most, Seen& seen);

 private:
  std::vector<WeakGraph> candidates_;  // in no order
  std::vector<WeakGraph> ahead_;       // backward has not come yet
};

}  // namespace ebb
