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

// Throws unless `rows` is what ebb::markRows takes for `tensor`: one integer, or a list of them.
void checkCount(const at::Tensor& tensor, const at::Tensor& rows);

// What `rows`, on the CPU, says. Throws c10::ValueError if `tensor` has fewer rows.
int64_t liveRows(const at::Tensor& tensor, const at::Tensor& rows);

// How many rows live. Shared by all that the same number, or on a device the same tensor, was given
// for.
struct RowCount final : c10::intrusive_ptr_target {
  explicit RowCount(int64_t live);            // on the CPU
  explicit RowCount(const at::Tensor& rows);  // on a device: one integer, or counts whose sum it is

  // Whether it is this number, on the CPU, where nobody need wait for it.
  bool is(int64_t live) const;

  // Whether it was made of `rows`, which has not been written since.
  bool isOf(const at::Tensor& rows) const;

  // How many rows are kept. Waits for the device, once.
  int64_t keptNow();

  // Each is one int64 on the tensor's device that nobody writes.
  at::Tensor count;  // rows that live
  at::Tensor kept;   // rows that are kept: one at least

 private:
  // What it was computed from; null on the CPU.
  c10::weak_intrusive_ptr<c10::StorageImpl> given_{c10::intrusive_ptr<c10::StorageImpl>()};
  uint32_t version_ = 0;
  int64_t offset_ = 0;
  std::vector<int64_t> shape_;  // sizes and strides
  c10::ScalarType dtype_;
  int64_t keptNow_ = 0;  // 0: nobody has asked
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
