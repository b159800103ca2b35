// Verify mode: what the forward left in a storage, to compare a replay with.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include <memory>
#include <mutex>
#include <string>

#include "graph/geometry.h"
#include "graph/graph.h"
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
  std::mutex mutex;                          // guards bytes: a storage may die on any thread
  c10::Storage bytes;                        // null while the state still lives in its storage
  bool lost = false;                         // the state was overwritten unseen: nothing to compare
  const OpTraits* op;                        // that made the state; its recipe may be gone
  uint16_t region;                           // index in Graph::names
  Output output;                             // which of the op's outputs it is
  c10::ScalarType dtype;                     // of that output, to compute differences
  std::string changedInputs;                 // see Mismatch
  std::shared_ptr<const Mismatch> mismatch;  // null unless a replay gave other bits
};

// Called when an op made a value, shown by `tensor`.
void witness(const Recipe& recipe, const Output& output, const at::Tensor& tensor);

// Called before `value`'s storage is written (`seen`), or when it turns out that it was.
void stateEnds(Value& value, bool seen);

// Called when a replay has given `value` its bytes.
void compareReplay(const Graph& graph, const Recipe& recipe, Value& value);

// Where the difference between `value`'s bytes and `truth` began.
const Mismatch& mismatchOf(const Graph& graph, Value& value, const c10::Storage& truth);

// The storage with what the forward left of `value`; null if that is not known.
c10::Storage trueBytes(Value& value);

// The same, for a comparison with `replayed`.
c10::Storage trueBytes(Value& value, const c10::Storage& replayed);

// Whether both storages show the same bits under this geometry.
bool sameBits(const Geometry& geometry, const c10::Storage& a, const c10::Storage& b);

// "ebb: replay mismatch: ..." with likely causes and the fix.
std::string describe(const Mismatch& mismatch);

}  // namespace ebb
