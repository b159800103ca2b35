// The lock that a thread needs to replay recipes of a graph.
#pragma once

#include <mutex>

#include "graph/graph.h"
#include "support/python_mutex.h"
#include "support/python_support.h"

namespace ebb {

// While a ReplayLock exists, its thread holds the graph's lock and has released the GIL. A function
// that replays recipes takes a ReplayLock. See Note [Locks and the GIL].
class ReplayLock {
 public:
  explicit ReplayLock(Graph& graph) : graph_(graph), lock_(graph.mutex) {}

  Graph& graph() const { return graph_; }

 private:
  Graph& graph_;
  WithoutGil withoutGil_;
  std::lock_guard<PythonMutex> lock_;  // taken after the GIL is released
};

}  // namespace ebb
