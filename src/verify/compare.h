// The verify mode: compares replays with the forward's results, and handles differences. See Note
// [Verify mode].
#pragma once

#include <c10/core/Storage.h>

#include "ebb/verify.h"
#include "graph/geometry.h"
#include "graph/graph.h"
#include "graph/recipe.h"
#include "graph/witness.h"

namespace ebb {

// Called after an op has made a value, shown by `tensor`.
void witness(const Recipe& recipe, const Output& output, const at::Tensor& tensor);

// Called before the storage of `value` is written (`seen`), or after ebb detects an unseen write.
void stateEnds(Value& value, bool seen);

// Called after a replay has given `value` its bytes.
void compareReplay(const Graph& graph, const Recipe& recipe, Value& value);

// Finds where the difference between the bytes of `value` and `truth` began.
const Mismatch& mismatchOf(const Graph& graph, Value& value, const c10::Storage& truth);

// The storage with the forward's bytes of `value`; null if unknown.
c10::Storage trueBytes(Value& value);

// The forward's bytes of `value`, for a comparison with `replayed`.
c10::Storage trueBytes(Value& value, const c10::Storage& replayed);

// True if both storages show the same bits under this geometry.
bool sameBits(const Geometry& geometry, const c10::Storage& a, const c10::Storage& b);

// The mode of regions entered from now on: the last mode set, else that of EBB_VERIFY.
EBB_API VerifyMode verifyMode();

// Throws ReplayMismatch. In the mode Demote, warns instead and saves the op's outputs from now on.
void reportMismatch(VerifyMode mode, const Mismatch& mismatch);

}  // namespace ebb
