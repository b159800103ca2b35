// Facts about operators that their schemas do not state. Every entry has a test.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "intercept/op_traits.h"

namespace ebb {

// True if the operator overwrites argument 0 in place, and completely, without reading it.
bool isWholeOverwrite(std::string_view name);

// See Note [Uninitialised memory is not a recipe] in record/op_recording.cpp.
bool isUninitialisedFactory(std::string_view name);
// True for zeros, ones, full and their like.
bool isConstantFactory(std::string_view name);

// See Note [Communication]
bool communicates(std::string_view name);

// The collectives that a rule may force to be recomputed, without overloads.
std::vector<std::string_view> repeatableCollectives();

// True if a rule may force replays of this collective: see Note [Repeated collectives].
bool isRepeatableCollective(std::string_view name);

// True if the collective writes this argument whole, and does not read it.
bool receivesInto(std::string_view name, std::string_view argument);

// See Note [Never replayed].
bool isNeverReplayed(std::string_view name);

// True if the operator only informs the allocator, though the schema says that it writes.
bool isAllocatorHint(std::string_view name);

// The settings of precision that the kernel reads.
PrecisionRead precisionRead(std::string_view name);

// True for convolutions. On devices other than the CPU, torch chooses one of several kernels.
bool isConvolution(std::string_view name);

// True if the choice of the kernel depends on grad mode and on the inputs' requires_grad.
bool readsRequiresGrad(std::string_view name);

// True if the kernel may read more of a storage than the argument shows, as as_strided_copy does.
bool readsBeyond(std::string_view name);

// True if result `slot` is a workspace for the backward kernel. Some of its bytes are never written
// or read, so they may differ after a replay. Used by verify mode only.
bool isWorkspace(std::string_view name, size_t slot);

// Sets OpTraits::rows.
void applyRowRule(OpTraits& traits);

// True if an operator of this name may write to an argument that the schema shows as read. See Note
// [Communication].
bool hidesWrite(std::string_view name, std::string_view argument);

// True if torch moves the version of this argument when the operator writes to it. See Note [Which
// writes are counted].
bool isCounted(const c10::OperatorHandle& op, const c10::Argument& argument);

// Corrects the ArgUse of arguments, and sets ArgumentTraits::condition, for schemas that are wrong
// or incomplete. See Note [Schemas that lie].
void applyLyingSchemas(OpTraits& traits);

}  // namespace ebb
