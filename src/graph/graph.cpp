#include "graph/graph.h"

#include "report/statistics.h"

namespace ebb {

Graph::~Graph() {
  countFromOutside();
}

// Frees the graph's members when the last strong reference is gone, since weak references of other
// graphs may keep the object itself.
void Graph::release_resources() {
  countFromOutside();
  fromOutside.hooked.reset();
  numbers.packs = {};
  lookahead.reset();
  collectives.clear();
  escapes.all.clear();
  pages.reset();
  observers.clear();
  journal.reset();
  names.clear();
}

// Counts the bytes of inputs whose last owner was a value: see Note [What only ebb holds]. All
// values of the graph are dead by now, since all owners of values refer to the graph.
void Graph::countFromOutside() {
  size_t nbytes = 0;
  for (const auto& value : fromOutside.values) {
    const Value* ended = value._unsafe_get_target();
    nbytes += ended->facts.wasLast ? ended->home.nbytes() : 0;
  }
  fromOutside.values.clear();
  if (nbytes > 0) {
    statisticsFromOutside(names.front(), nbytes);
  }
}

}  // namespace ebb
