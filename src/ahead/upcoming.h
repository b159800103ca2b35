// The choice of the graph that backward will reach next.
#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

#include "graph/graph.h"
#include "graph/lookahead.h"

namespace ebb {

// Weak references to graphs that backward may reach next, and to graphs already replayed ahead.
class Upcoming {
 public:
  // Strong references taken on the way. The caller drops them without a lock, since a graph may die
  // with its last reference.
  using Seen = std::vector<c10::intrusive_ptr<Graph>>;

  void add(c10::ArrayRef<WeakGraph> graphs) {
    candidates_.insert(candidates_.end(), graphs.begin(), graphs.end());
  }

  // Called when backward reaches another graph than expected.
  void forgetAhead() {
    ahead_.clear();
  }

  // Takes the most recently recorded candidate, since autograd reaches that graph first, and adds
  // the graph to those replayed ahead. Null if there is no candidate, or if `most` graphs have been
  // replayed ahead already.
  c10::intrusive_ptr<Graph> take(size_t most, Seen& seen);

 private:
  std::vector<WeakGraph> candidates_;  // in no order
  std::vector<WeakGraph> ahead_;       // replayed, not reached by backward yet
};

}  // namespace ebb
