// Which rows of a storage live, and which operators keep rows apart.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "intercept/op_traits.h"

namespace ebb {

struct Value;

// Note [Rows]
// The user says of one tensor that its first rows live (ebb.mark_rows). A storage has rows if it is
// so many stretches of bytes of one size, one after the other, and which of them live is known. An
// operator keeps rows apart if row i of its result is made of row i of arguments that have rows,
// and of what is the same for all rows; then its result has rows too. Not if an argument with a row
// for each of them has none: a residual, or a mask, may make live rows of dead ones. Nor if an
// argument is only written over. What row i of a view is follows from its strides: a view may show
// a row as several, or a part of each. All other operators may mix rows: their results have none.
// What is in dead rows must not matter to the program, and it does not come back: see Note [Dead
// rows] in residency/paging.h. So a value that is made of such rows cannot be recomputed exactly,
// but row by row: it is `lossy`. An operator that may mix rows of lossy values is not run again;
// its results are kept. And if it saves such a value for its backward, that value is kept whole.

// How many rows live. Shared by all that the same tensor was given for.
struct RowCount final : c10::intrusive_ptr_target {
  // `rows` as the user gave it: one integer, or counts whose sum it is. Throws if it is neither.
  RowCount(const at::Tensor& tensor, const at::Tensor& rows);

  // Whether `rows`, which says `now`, is known to say the same: on the CPU by the number, elsewhere
  // if it is the tensor that was given, and has not been written since.
  bool isOf(const at::Tensor& rows, const RowCount& now) const;

  // Throws c10::ValueError if `tensor` has fewer rows; on the CPU only, where that is known.
  void check(const at::Tensor& tensor) const;

  at::Tensor count;  // one int64, on the tensor's device; written by nobody
  at::Tensor kept;   // likewise: how many rows are kept, one at least

 private:
  c10::weak_intrusive_ptr<c10::StorageImpl> given_;  // what it was computed from
  uint32_t version_ = 0;
  int64_t offset_ = 0;
  std::vector<int64_t> shape_;  // sizes and strides
  c10::ScalarType dtype_;
};
using RowCountPtr = c10::intrusive_ptr<RowCount>;

struct Rows {
  RowCountPtr live;
  int64_t most = 0;                                    // rows of the storage
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of the tensor that was made
  bool lossy = false;                                  // see above
};

// Whether `tensor` is its whole storage, row after row.
bool isRowAfterRow(const at::Tensor& tensor);

// The rows of a storage of `nbytes` bytes that `tensor` shows: how many it shows them as. 0 if the
// tensor shows them in another way than one after the other.
int64_t rowsShown(const at::Tensor& tensor, const Rows& rows, size_t nbytes);

// What one call does with rows: fed with its arguments before it runs, asked about its results
// after.
class RowFlow {
 public:
  RowFlow(const OpTraits& op, const c10::IValue* arguments) : op_(op), arguments_(arguments) {
  }

  // An argument that is read, and shows `value`; null: it has no rows, as far as is known.
  void add(const at::Tensor& tensor, size_t argument, const Value* value);

  // Whether all that has rows is read row by row. All arguments have been added.
  bool keepsApart() const;

  // The rows of a result that is a storage of its own; null if it has none.
  std::unique_ptr<Rows> of(const at::Tensor& result) const;

  // Likewise of what is left of a storage with rows after the call has written `argument`.
  std::unique_ptr<Rows> ofWritten(const at::Tensor& argument, const Value& before) const;

  // Whether a result without rows cannot be made again.
  bool isLossy() const {
    return lossy_ && op_.rows != RowRule::ShapeOnly;
  }

 private:
  bool keepsApart(const at::Tensor& tensor, size_t argument) const;

  // Of an argument without rows.
  struct Extent {
    int64_t dimensions;
    int64_t leading;  // the first size
    size_t argument;
  };
  const OpTraits& op_;
  const c10::IValue* arguments_;
  RowCountPtr live_;                     // null: no argument has rows
  int64_t most_ = 0;                     // of the storages
  int64_t leading_ = 0;                  // of the arguments that have rows: their first size
  int64_t dimensions_ = 0;               // likewise
  c10::SmallVector<Extent, 4> extents_;  // of the arguments without
  bool apart_ = true;                    // so far: rows are kept apart
  bool lossy_ = false;                   // some argument is
};

}  // namespace ebb
