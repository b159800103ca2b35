// Verify mode: what the forward left in a storage, to compare a replay with.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <memory>
#include <mutex>
#include <string>

#include "graph/recipe.h"

namespace ebb {

// A replay that gave other bits than the forward, where the difference begins.
struct Mismatch {
  std::string region;            // name of the region that recorded the op
  const OpTraits* op;            // the op
  std::string output;            // "result 0", or "argument 0, which it writes"
  std::string changedInputs;     // inputs that changed since the forward; empty if none is known to
  size_t elements = 0;           // of the output
  size_t differing = 0;          // of these elements
  double largestDifference = 0;  // between two of them; infinity if a NaN or infinity is among them
};

// Note [Verify mode]
// Nothing is kept alive for the sake of the comparison, so memory lives and dies as it does without
// it. A state's bytes are copied when they are lost: just before a write that ebb sees, or when the
// last reference to the storage goes (see Note [Poison]). Values that have a recipe are replayed
// even while their tensor is alive. Each output of a replay is compared with what the forward left;
// only a tensor that backward unpacks and that differs is an error, since gradients depend on
// nothing else. Where the difference began tells `mismatch`: an output that differs although
// no input of its op does.
struct Witness {
  std::mutex mutex;           // guards bytes: a storage may die on any thread
  c10::Storage bytes;         // null while the state still lives in its storage
  bool lost = false;          // nothing to compare: a workspace, or overwritten unseen
  const OpTraits* op;         // that made the state; its recipe may be gone
  uint16_t region;            // index in Graph::names
  Output output;              // which of the op's outputs it is
  c10::ScalarType dtype;      // of that output, to compute differences
  std::string changedInputs;  // see Mismatch
  std::shared_ptr<const Mismatch> mismatch;  // null unless a replay gave other bits
};

}  // namespace ebb
