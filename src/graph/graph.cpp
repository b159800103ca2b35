#include "graph/graph.h"

#include "graph/escaped.h"

namespace ebb {

Graph::Graph() = default;
Graph::~Graph() = default;

}  // namespace ebb
