// Which rows of a storage live.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace ebb {

// Note [Rows]
// The user says of one tensor that its first rows live (ebb.mark_rows). A storage has rows if it is
// so many stretches of bytes of one size, one after the other, and which of them live is known. An
// operator keeps rows apart if row i of its result is made of row i of arguments that have rows,
// and of what is the same for all rows; then its result has rows too. Not if an argument with a row
// for each of them has none: a residual, or a mask, may make live rows of dead ones. Nor if an
// argument is only written over. What row i of a view is follows from its strides: a view may show
// a row as several, or a part of each. All other operators may mix rows: their results have none.
// What is in dead rows must not matter to the program, and it does not come back: see Note [Dead
// rows] in paging/paging.h. So a value that is made of such rows cannot be recomputed exactly,
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

  // Each is one int64 on the tensor's device that nobody writes.
  at::Tensor count;  // rows that live
  at::Tensor kept;   // rows that are kept: one at least

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
  int64_t total = 0;                                   // rows of the storage
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of the tensor that was made
  bool lossy = false;                                  // see above
};

// Whether `tensor` is its whole storage, row after row.
bool isRowAfterRow(const at::Tensor& tensor);

}  // namespace ebb
