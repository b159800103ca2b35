#include "graph/graph.h"

#include "report/statistics.h"

namespace ebb {

Graph::Graph() = default;

Graph::~Graph() {
  countFromOutside();
}

// The graph has no strong reference left, but other graphs may refer to it weakly.
void Graph::release_resources() {
  countFromOutside();
  lookahead.reset();
  collectives.reset();
  escapes.all.clear();
  pages.reset();
  journal.reset();
  names.clear();
}

// The graph's values have ended before: all owners of values refer to the graph.
void Graph::countFromOutside() {
  size_t nbytes = 0;
  for (const auto& value : fromOutside) {
    const Value* ended = value._unsafe_get_target();
    nbytes += ended->facts.wasLast ? ended->home.nbytes() : 0;
  }
  fromOutside.clear();
  if (nbytes > 0) {
    statisticsFromOutside(names.front(), nbytes);
  }
}

}  // namespace ebb
