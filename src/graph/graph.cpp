#include "graph/graph.h"

#include "graph/escapes.h"

namespace ebb {

Graph::Graph() = default;
Graph::~Graph() = default;

}  // namespace ebb
