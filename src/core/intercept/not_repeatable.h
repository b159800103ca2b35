// Operators of torch whose kernels on an accelerator may give other bits in a second run.
#pragma once

#include <cstdint>
#include <string_view>

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

struct NotRepeatable {
  std::string_view name;  // without overload
  Unordered what;
  // Overloads without this argument repeat their bits. Calls repeat their bits if the argument is a
  // tensor with one element, since equal numbers in any order give equal results. Empty: none.
  std::string_view from;
  bool hasOther = true;  // another kernel with torch.use_deterministic_algorithms
};

// The list's entry for the operator; null if there is none.
const NotRepeatable* notRepeatable(std::string_view name);

}  // namespace ebb
