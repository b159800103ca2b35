// The states of a storage before and after an op writes to it.
#pragma once

#include "graph/recipe.h"
#include "graph/value.h"
#include "hooks/decider.h"
#include "record/arguments.h"
#include "record/value_map.h"

namespace ebb {

// The op is about to write: copies old contents that other recipes still need. `recipe`: the op's,
// or null.
void prepareWrites(
    ValueMap& values, const Call& call, const Arguments& arguments, const Recipe* recipe);

// Makes the value for the state that `op` left, without a recipe so far. `decides`: the policy may
// decide on the value.
c10::intrusive_ptr<Value> stateAfter(
    const Write& write, const OpTraits& op, const Verdict& verdict, bool decides);

// True if a replay of the op would write the same part of the storage.
bool canBeRepeated(const Write& write);

}  // namespace ebb
