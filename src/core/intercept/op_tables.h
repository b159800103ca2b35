// Facts about operators that their schemas do not state. Every entry has a test.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

#include "intercept/op_traits.h"

namespace ebb {

// True if a table of operators has this name.
template <size_t N>
bool contains(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::ranges::find(names, name) != names.end();
}

// Sets the facts in OpTraits::limits and kernel that follow from the operator's name, and
// corrects ArgumentTraits for schemas that are wrong or incomplete.
void applyTables(OpTraits& traits);

// True if the operator overwrites argument 0 in place, and completely, without reading it.
bool isWholeOverwrite(std::string_view name);

// See Note [Communication]
bool communicates(std::string_view name);

// The collectives that a rule may force to be recomputed, without overloads.
std::vector<std::string_view> repeatableCollectives();

// True if a rule may force replays of this collective: see Note [Repeated collectives].
bool isRepeatableCollective(std::string_view name);

// True if the collective writes this argument whole, and does not read it.
bool receivesInto(std::string_view name, std::string_view argument);

// True if result `slot` is a workspace for the backward kernel. Some of its bytes are never written
// or read, so they may differ after a replay. Used by verify mode only.
bool isWorkspace(std::string_view name, size_t slot);

// True if an operator of this name may write to an argument that the schema shows as read. See Note
// [Communication].
bool hidesWrite(std::string_view name, std::string_view argument);

// True if torch moves the version of this argument when the operator writes to it. See Note [Which
// writes are counted].
bool isCounted(const c10::OperatorHandle& op, const c10::Argument& argument);

}  // namespace ebb
