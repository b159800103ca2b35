#include "graph/graph.h"

namespace ebb {

Graph::~Graph() = default;

// Frees the graph's members when the last strong reference is gone, since weak references of other
// graphs may keep the object itself.
void Graph::release_resources() {
  numbers.packs = {};
  extras = {};
  observers.clear();
  names.clear();
}

}  // namespace ebb
