// How operators treat the rows of their arguments.
#pragma once

#include <cstdint>

#include "intercept/op_traits.h"

namespace ebb {

// The effect of an op on the rows of its arguments: see Note [Rows] in stores/rows.h.
enum class RowRule : uint8_t {
  Unknown,      // may mix rows
  EachRow,      // element by element, with broadcasting
  OneArgument,  // result row i depends on row i of one argument, and on all of the others
  Groups,       // result row i depends on row i of argument 0, if argument 1 is a stack of matrices
  Batches,      // batched matrix products
  TrailingDims,  // normalises over the last dimensions; RowTraits::argument has their sizes
  AlongDims,     // works along given dimensions
};

struct RowTraits {
  RowRule rule = RowRule::Unknown;
  // The argument with rows (OneArgument), or the argument with the sizes or dimensions for `rule`.
  int16_t argument = -1;
};

// The rule for an operator. Takes a lock.
const RowTraits& rowTraitsOf(const OpTraits& op);

}  // namespace ebb
