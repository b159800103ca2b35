// The shared state of all values of one outermost region.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <string>
#include <vector>

#include "conditions/kernel_state.h"
#include "graph/observers.h"
#include "graph/pack_order.h"
#include "graph/region_names.h"
#include "graph/streams.h"
#include "graph/value.h"
#include "support/python_mutex.h"

namespace ebb {

struct Graph;
using WeakGraph = c10::weak_intrusive_ptr<Graph>;

// Counters that number the recipes of a graph and the searches over the recipes, and the values by
// the numbers of autograd's nodes.
struct RecipeNumbers {
  uint64_t sequence = 0;  // of the last recorded recipe; replays run in this order
  uint32_t visit = 0;     // of the last search, which writes the number into each recipe visited
  PackOrder packs;        // see Note [Saved by one node]
};

// How plug-ins want the graph to be replayed. Set when the graph opens, or later under its lock.
struct GraphRules {
  // All bits of each replay are compared with the forward's, and all of each leaf with what recipes
  // read, whatever that costs.
  bool compareAll = false;
  bool raiseIfDifferent = false;  // false: a difference is mended
  bool onlyInBackward = false;    // no replays ahead of backward
  // All ranks must replay the same recipes. So ebb keeps a value that it would recompute for a
  // reason which another rank may not have.
  bool sameOnAllRanks = false;

  FingerprintOf fingerprints() const {
    return compareAll ? FingerprintOf::Everything : FingerprintOf::Samples;
  }
};

// Note [One lock per graph]
// Recipes never cross an outermost region: a storage first met in a region is a leaf there. So
// graphs are independent and each has one lock. A region holds the lock while recording an op, but
// not during the op's kernel. A replay holds the lock throughout, kernels included; see Note [Locks
// and the GIL]. Destructors of handles, values and recipes take no lock of a graph: they only count
// references.
//
// A graph: the classes that record a region store data for backward here.
struct EBB_API Graph final : c10::intrusive_ptr_target {
  PythonMutex mutex;          // See Note [One lock per graph]
  RegionNames names;          // of the nested regions; the outermost is first
  KernelStates kernelStates;  // settings under which recipes were recorded
  GraphStreams streams;       // see Note [Bytes of several streams]
  RecipeNumbers numbers;
  GraphRules rules;
  Observers observers;
  bool hasUnpacked = false;  // the thread unpacked a saved tensor while the region was open
  Extras extras;             // of plug-ins

  ~Graph() override;

  void release_resources() override;
};

}  // namespace ebb
