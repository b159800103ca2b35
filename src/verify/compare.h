// Comparing replays with what the forward left: see Note [Verify mode].
#pragma once

#include <c10/core/Storage.h>

#include <string>

#include "graph/geometry.h"
#include "graph/graph.h"
#include "graph/recipe.h"
#include "graph/witness.h"

namespace ebb {

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
