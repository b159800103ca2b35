// Determines which operators keep rows apart.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "graph/value.h"
#include "intercept/op_traits.h"
#include "stores/rows.h"

namespace ebb {

// If the first dimension of `tensor` runs over the rows of the storage, or over equal parts of the
// rows, returns the size of this dimension; otherwise 0. `nbytes`: the size of the storage.
int64_t rowsShown(const at::Tensor& tensor, const RowFacts& rows, size_t nbytes);

struct RowTraits;
using RowsPtr = c10::intrusive_ptr<Rows>;

// Finds which results of one call have rows: see Note [Rows]. Arguments are added before the call
// runs; results are queried afterwards.
class RowFlow {
 public:
  RowFlow(const OpTraits& op, const c10::IValue* arguments);

  // Adds an argument that the call reads. `value`: its value; null: the argument has no known rows.
  void add(const at::Tensor& tensor, size_t argument, const Value* value);

  // True if all arguments with rows are read row by row. Called after all arguments were added.
  bool keepsApart() const;

  // The rows of a result with a storage of its own; null if there are none.
  RowsPtr of(const at::Tensor& result) const;

  // The rows of `argument` after the call has written to it; `before` is the state before the
  // write.
  RowsPtr ofWritten(const at::Tensor& argument, const Value& before) const;

  // True if the call reads the data of an argument whose padding rows ebb does not restore
  // (Rows::lossy). ebb then cannot recompute those results of the call that have no rows.
  bool isLossy() const { return lossy_ && !op_.arguments.readsOnlyShapes; }

 private:
  bool keepsApart(const at::Tensor& tensor, size_t argument) const;

  // The sizes of an argument whose valid rows ebb does not know.
  struct Extent {
    int64_t dimensions;
    int64_t leading;  // the first size
    size_t argument;
  };
  const OpTraits& op_;
  const RowTraits& rows_;
  const c10::IValue* arguments_;
  RowsPtr rowsOf(c10::ScalarType dtype) const;

  RowCountPtr live_;                     // null: no argument has rows
  const Value* first_ = nullptr;         // the first value with rows
  int64_t total_ = 0;                    // rows of the storages
  int64_t leading_ = 0;                  // first size of the arguments with rows
  int64_t dimensions_ = 0;               // number of dimensions of the arguments with rows
  c10::SmallVector<Extent, 4> extents_;  // arguments without rows
  bool apart_ = true;                    // rows are kept apart so far
  bool lossy_ = false;                   // an argument is lossy
  bool several_ = false;                 // the arguments show several values with rows
};

}  // namespace ebb
