// Facts about operators that their schemas do not state. Every entry has a test.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>
#include <vector>

#include "intercept/op_traits.h"

namespace ebb {

// Note [Kernels that do not repeat their bits]
// Many threads of an accelerator run a kernel at once, and their order changes from run to run. A
// replay of such a kernel may give other last bits than the forward, or an index of another
// element. No exception would show this. So the results are kept, with these exceptions:
// - on the CPU, where the kernels listed here repeat their bits;
// - if torch.use_deterministic_algorithms is on, since torch then picks another kernel or raises.
//   With warn_only torch does neither, so the results are kept;
// - if a rule says force.
// The list has the operators for which torch.use_deterministic_algorithms picks another kernel or
// raises, and scans by CUB, whose order torch does not control.
enum class Unordered : uint8_t {
  Sums,    // atomic additions; the bits differ only for floating-point numbers
  Scans,   // like Sums, if the tensor has one dimension that is not 1
  Writes,  // of several writes to one element, any may be the last
  Picks,   // of several equal elements, any may be chosen
};

// An operator of torch whose kernel on an accelerator may give other bits in a second run.
struct NotRepeatable {
  std::string_view name;  // without overload
  Unordered what;
  // Overloads without this argument repeat their bits. Calls repeat their bits if the argument is a
  // tensor with one element, since equal numbers in any order give equal results. Empty: none.
  std::string_view from;
  bool hasOther = true;  // another kernel with torch.use_deterministic_algorithms
};

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

// True if an operator of this name may write to an argument that the schema shows as read. See Note
// [Communication].
bool hidesWrite(std::string_view name, std::string_view argument);

// True if torch moves the version of this argument when the operator writes to it. See Note [Which
// writes are counted].
bool isCounted(const c10::OperatorHandle& op, const c10::Argument& argument);

}  // namespace ebb
