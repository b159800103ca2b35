// Valid rows of a storage.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace ebb {

// Note [Rows]
// With ebb.mark_rows the user says that the first rows of one tensor are valid (live). A storage
// has rows if it is a sequence of stretches of equal size, and the number of valid ones is known.
// An operator keeps rows apart if row i of its result depends only on row i of the arguments with
// rows, and on data that is the same for all rows. Then the result has rows too. A residual or a
// mask with an entry per row but without known rows may turn padding (dead) rows into valid ones,
// so the result of such a call has no rows. Arguments that are only overwritten do not count. The
// strides of a view tell which bytes row i covers: a view may show a row as several rows, or a part
// of each. All other operators may mix rows, so their results have no rows.
// The contents of padding rows must not matter to the program, and ebb does not restore them: see
// Note [Dead rows] in paging/paging_engine.h. So a paged value, or a value recomputed from a paged
// value, is exact only in its valid rows: the value is `lossy`. If an operator may mix rows of
// lossy values, ebb keeps the results and does not replay the operator. If such an operator saves a
// lossy value for its backward, ebb keeps the whole value.

// Throws unless `rows` is a valid argument of ebb::markRows for `tensor`: one integer, or a list of
// integers.
void checkCount(const at::Tensor& tensor, const at::Tensor& rows);

// The number of valid rows according to `rows`, on the CPU. Throws c10::ValueError if `tensor` has
// fewer rows.
int64_t liveRows(const at::Tensor& tensor, const at::Tensor& rows);

// The number of valid rows. All marks with the same number share one RowCount; on a device, all
// marks with the same tensor.
struct RowCount final : c10::intrusive_ptr_target {
  explicit RowCount(int64_t live);            // on the CPU
  explicit RowCount(const at::Tensor& rows);  // on a device: one integer, or counts to add up

  // True if the count is on the CPU, where reading it waits for nothing, and equals `live`.
  bool is(int64_t live) const;

  // True if this was created from `rows`, and `rows` has not been written since.
  bool isOf(const at::Tensor& rows) const;

  // How many rows a pool takes: the valid rows, at least 1. Waits for the device once.
  int64_t keptNow();

  // Both tensors are one int64 on the marked tensor's device, and are never written.
  at::Tensor count;  // valid rows
  at::Tensor kept;   // kept rows: at least one

 private:
  // Storage of the given count; null on the CPU.
  c10::weak_intrusive_ptr<c10::StorageImpl> given_{c10::intrusive_ptr<c10::StorageImpl>()};
  uint32_t version_ = 0;
  int64_t offset_ = 0;
  std::vector<int64_t> shape_;  // sizes and strides
  c10::ScalarType dtype_;
  int64_t keptNow_ = 0;  // 0: not read yet
};
using RowCountPtr = c10::intrusive_ptr<RowCount>;

struct Rows {
  RowCountPtr live;
  int64_t total = 0;                                   // rows of the storage
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of the computed tensor
  bool lossy = false;                                  // see Note [Rows]
};

// True if `tensor` is contiguous and covers its whole storage.
bool isRowAfterRow(const at::Tensor& tensor);

}  // namespace ebb
