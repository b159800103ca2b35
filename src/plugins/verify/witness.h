// Verify mode: the forward's bytes of a storage, to compare a replay with.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <memory>
#include <mutex>
#include <string>

#include "graph/recipe.h"
#include "hooks/slots.h"

namespace ebb {

// The first output, in the order of replays, whose bits differ from the forward's.
struct Mismatch {
  std::string region;            // name of the region that recorded the op
  const OpTraits* op;            // the op
  std::string output;            // "result 0", or "argument 0, which it writes"
  std::string changedInputs;     // inputs known to have changed since the forward; empty: none
  size_t elements = 0;           // of the output
  size_t differing = 0;          // elements that differ
  double largestDifference = 0;  // between two elements; infinity if one is NaN or infinite
};

// Note [Verify mode]
// Verify mode keeps no tensor alive for the comparison, so memory is freed at the same times as in
// other modes. ebb copies a value's bytes when they are about to be lost: just before a visible
// write, or when the last reference to the storage goes (see Note [Poison]). ebb replays values
// with a recipe even while their tensor is alive. Each output of a replay is compared with the
// forward's bytes. A difference is an error only in a tensor unpacked by backward, since gradients
// depend on nothing else. `mismatch` tells where the difference began: an output that differs
// although no input of its op does. A backward function may write, unseen, to an unpacked tensor
// that is still alive. Eager allows that write, and verify mode reports it: a later unpack sees the
// write only while the tensor is alive, so gradients could depend on how long the program keeps it.
struct Witness final : Extra {
  static const SlotNumber kSlot;

  // Guards bytes and lost: a storage may die on any thread. Code that holds it neither allocates
  // nor drops bytes, since both may need the GIL: see Note [Locks and the GIL].
  std::mutex mutex;
  c10::Storage bytes;         // null while the state still lives in its storage
  bool lost = false;          // nothing to compare: a workspace, or overwritten unseen
  const OpTraits* op;         // the op of the state; the recipe may be gone
  uint16_t region;            // index in Graph::names
  Output output;              // identifies the op's output
  c10::ScalarType dtype;      // of that output, to compute differences
  std::string changedInputs;  // see Mismatch
  std::shared_ptr<const Mismatch> mismatch;  // null unless a replay gave other bits
};

}  // namespace ebb
