// Shared state of the parts of a recorder.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <cstdint>

#include "ebb/report.h"
#include "graph/graph.h"
#include "hooks/decider.h"

namespace ebb {

class Results;

// The open outermost region, and the settings of the innermost one.
struct Context {
  c10::intrusive_ptr<Graph> graph{};   // shared with the handles; null between regions
  Decider* decider = nullptr;          // of the innermost region
  RegionCounters* counters = nullptr;  // of the innermost region
  uint16_t region = 0;                 // index of the innermost region in Graph::names
  uint32_t nested = 0;                 // see Recipe::nested
  bool trustCustomOps = false;         // see Note [Custom operators]
  const Results* results = nullptr;    // results of earlier regions of the thread
  RegionNotes* notes = nullptr;        // of the outermost region; plug-ins may add to them

  // True if the rule behind `verdict`, or the checkpointed call around the op, declares a custom
  // operator repeatable: a second call gives the same results. See Note [Custom operators].
  bool trusts(const Verdict& verdict) const { return trustCustomOps || verdict.byRule; }

  const std::string& regionName() const { return graph->names[region]; }
};

}  // namespace ebb
