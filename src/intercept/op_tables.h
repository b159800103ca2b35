// Facts about operators that their schemas do not state. Every entry has a test.
#pragma once

#include <cstdint>
#include <string_view>

#include "intercept/op_traits.h"

namespace ebb {

// Whole overwrites in place: argument 0 is written without being read.
bool isWholeOverwrite(std::string_view name);

// See Note [Uninitialised memory is not a recipe] in record/op_recording.cpp.
bool isUninitialisedFactory(std::string_view name);
bool isConstantFactory(std::string_view name);

// See Note [Communication]
bool communicates(std::string_view name);

// See Note [Never replayed].
bool isNeverReplayed(std::string_view name);

// Tells the allocator something, though its schema says that it writes.
bool isAllocatorHint(std::string_view name);

// Which settings of precision the kernel reads.
PrecisionRead precisionRead(std::string_view name);

// Off the CPU its kernel is chosen among several.
bool isConvolution(std::string_view name);

// The kernel that runs depends on grad mode and on the inputs' requires_grad.
bool readsRequiresGrad(std::string_view name);

// The kernel may read more of a storage than its argument shows: as_strided_copy and its like.
bool readsBeyond(std::string_view name);

// Result `slot` is a workspace for the backward kernel, with bytes that no kernel ever writes or
// reads: a replay may leave others there. Only verify mode asks.
bool isWorkspace(std::string_view name, size_t slot);

// Sets OpTraits::rows and rowArgument.
void applyRowRule(OpTraits& traits);

// Whether an operator of this name may write to an argument which its schema shows as read.
// See Note [Communication].
bool hidesWrite(std::string_view name, std::string_view argument);

// Whether torch moves the version of what the operator writes to this argument.
// See Note [Which writes are counted].
bool isCounted(const c10::OperatorHandle& op, const c10::Argument& argument);

// Schemas that lie, or say less than is needed: sets ArgUse and conditionArgument.
// See Note [Schemas that lie].
void applyLyingSchemas(OpTraits& traits);

}  // namespace ebb
