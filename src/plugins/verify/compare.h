// How verify mode compares replays with the forward's results, and handles differences. See Note
// [Verify mode].
#pragma once

#include <c10/core/Storage.h>

#include <atomic>
#include <string>

#include "ebb/verify.h"
#include "graph/geometry.h"
#include "graph/graph.h"
#include "plugins/verify/witness.h"

namespace ebb {

// Finds where the difference between the bytes of `value` and `truth` began.
const Mismatch& mismatchOf(const Graph& graph, Value& value, const c10::Storage& truth);

// The forward's bytes of `value`, for a comparison with `replayed`.
c10::Storage trueBytes(Value& value, const c10::Storage& replayed);

// True if both storages have the same bytes.
bool sameBytes(const c10::Storage& a, const c10::Storage& b);

// True if both storages show the same bits under this geometry.
bool sameBits(const Geometry& geometry, const c10::Storage& a, const c10::Storage& b);

// The mode of regions entered from now on: the last mode set, else that of EBB_VERIFY.
EBB_API VerifyMode verifyMode();

// With Python, throws ebb.ReplayMismatch. Null without.
EBB_API extern std::atomic<void (*)(const std::string& message, const Mismatch& mismatch)>
    throwMismatch;

// Throws ReplayMismatch. In the mode Demote, warns instead and saves the op's outputs from now on.
void reportMismatch(VerifyMode mode, const Mismatch& mismatch);

}  // namespace ebb
