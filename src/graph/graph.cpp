#include "graph/graph.h"

#include "graph/escaped.h"

namespace ebb {

Graph::Graph() = default;
Graph::~Graph() = default;

// Nobody holds it any more, but other graphs may know it weakly.
void Graph::release_resources() {
  lookahead.reset();
  escapes.clear();
  pages.reset();
  journal.reset();
  names.clear();
}

}  // namespace ebb
