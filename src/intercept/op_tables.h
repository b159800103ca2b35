// Facts about operators that their schemas do not state. Every entry has a test.
#pragma once

#include <cstdint>
#include <string_view>

#include "intercept/op_traits.h"

namespace ebb {

// Whole overwrites in place: argument 0 is written without being read.
bool isWholeOverwrite(std::string_view name);

// See Note [Uninitialised memory is not a recipe] in graph/recorder.cpp.
bool isUninitialisedFactory(std::string_view name);
bool isConstantFactory(std::string_view name);

// See Note [Never replayed].
bool isNeverReplayed(std::string_view name);

// Which settings of float32 precision the kernel reads.
PrecisionRead precisionRead(std::string_view name);

// The kernel that runs depends on grad mode and on the inputs' requires_grad.
bool readsRequiresGrad(std::string_view name);

// Result `slot` is a workspace for the backward kernel, with bytes that no kernel ever writes or
// reads: a replay may leave others there. Only verify mode asks.
bool isWorkspace(std::string_view name, size_t slot);

// Sets OpTraits::rows and rowArgument.
void applyRowRule(OpTraits& traits);

// Schemas that lie, or say less than is needed: sets ArgUse and trainingArgument.
// See Note [Schemas that lie].
void applyLyingSchemas(OpTraits& traits);

}  // namespace ebb
