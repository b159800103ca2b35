// Valid rows of a storage.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "ebb/paging.h"
#include "hooks/slots.h"

namespace ebb {

// Note [Rows]
// With mark_rows the user says that the first rows of one tensor are valid (live). A storage
// has rows if it is a sequence of stretches of equal size, and the number of valid ones is known.
// An operator keeps rows apart if row i of its result depends only on row i of the arguments with
// rows, and on data that is the same for all rows. Then the result has rows too. A residual or a
// mask with an entry per row but without known rows may turn padding (dead) rows into valid ones,
// so the result of such a call has no rows. Arguments that are only overwritten do not count. The
// strides of a view tell which bytes row i covers: a view may show a row as several rows, or a part
// of each. All other operators may mix rows, so their results have no rows.
// The contents of padding rows must not matter to the program, and ebb does not restore them: see
// Note [Dead rows]. So a paged value, or a value recomputed from a paged
// value, is exact only in its valid rows: the value is `lossy`. If an operator may mix rows of
// lossy values, ebb keeps the results and does not replay the operator. If such an operator saves a
// lossy value for its backward, ebb keeps the whole value.
//
// Note [Dead rows]
// The contents of padding rows do not matter: the user declares so with mark_rows. But kernels
// compute with padding rows: 0 / 0 in a row whose gradient is zero is NaN, and a product over all
// rows spreads the NaN. So padding rows come back as copies of the first valid row, which cause no
// NaN that the valid row does not cause. Zeros would: `h / h.sum()` of a row. Also, the backward of
// prod uses another algorithm for all rows if one element is zero, with other bits. If no row is
// valid, the first padding row is paged for this purpose. In verify mode (not with demote, which
// promises correct gradients) padding rows come back as NaN, to expose a program that depends on
// their contents.
//
// A copy of the valid row is harmless only beside copies of the same row. The backward of amax
// divides by the number of elements that equal the maximum; it finds none if the input's padding
// comes from a page and the maximum's padding from the forward. So if one autograd node saves
// several values with rows, and one of them is lossy (NodeRows), all of them get such padding: a
// replay writes the padding of its result, and a handle on bytes of the forward (saved, held by the
// program, or not yet freed) shows a copy with such padding. For the same reason a replay that
// reads several values with rows writes the padding of its result (Rows::pads). A node with one
// value needs none of this: its padding rows are all of the forward or all of a replay.

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

  // `kept`, which the current stream is about to read.
  const at::Tensor& keptOnCurrent() const;

  // Both tensors are one int64 on the marked tensor's device, and are never written.
  at::Tensor count;  // valid rows
  at::Tensor kept;   // kept rows: at least one

  DeadRows padding = DeadRows::Repeat;  // padding rows that backward sees
  bool isPaged = false;  // a value with these rows has been paged, so its padding rows are lost

 private:
  // Storage of the given count; null on the CPU.
  c10::weak_intrusive_ptr<c10::StorageImpl> given_{c10::intrusive_ptr<c10::StorageImpl>()};
  uint32_t version_ = 0;
  int64_t offset_ = 0;
  std::vector<int64_t> shape_;  // sizes and strides
  c10::ScalarType dtype_;
  int64_t keptNow_ = 0;               // 0: not read yet
  std::optional<c10::Stream> maker_;  // stream that computed the tensors; none on the CPU
};
using RowCountPtr = c10::intrusive_ptr<RowCount>;

// The rows of one storage.
struct RowFacts {
  RowCountPtr live;
  int64_t total = 0;                                   // rows of the storage
  c10::ScalarType dtype = c10::ScalarType::Undefined;  // of the computed tensor
  bool lossy = false;                                  // see Note [Rows]
  bool pads = false;    // a replay writes the padding rows: see Note [Dead rows]
  bool padded = false;  // the bytes that ebb made have such padding rows
  bool mixed = false;   // saved by an operator whose results may mix several rows
};

// The rows of a value; a value without this extra has no known rows.
struct Rows final : Extra, RowFacts {
  explicit Rows(RowFacts facts) : RowFacts(std::move(facts)) {}
  static const SlotNumber kSlot;

  bool isPartial() const override { return lossy; }
};

// True if a NaN of `dtype` consists of bytes 0xFF.
bool hasNan(c10::ScalarType dtype);

// Writes the padding rows of `storage` as RowCount::padding says. The host does not wait.
void writePadding(const c10::Storage& storage, const RowFacts& rows);

// True if `tensor` is contiguous and covers its whole storage.
bool isRowAfterRow(const at::Tensor& tensor);

}  // namespace ebb
