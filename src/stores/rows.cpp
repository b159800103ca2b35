#include "stores/rows.h"

#include <ATen/ops/add.h>
#include <ATen/ops/any.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bitwise_and.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <string>

#include "memory/bytes.h"
#include "stream/stream.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 40;  // a power of two, for a bit mask

std::vector<int64_t> shapeOf(const at::Tensor& rows) {
  std::vector<int64_t> shape = rows.sizes().vec();
  shape.insert(shape.end(), rows.strides().begin(), rows.strides().end());
  return shape;
}

// The rows of `storage`, in the widest integers whose size divides the size of a row.
at::Tensor wordsOf(const c10::Storage& storage, int64_t rows) {
  const auto rowBytes = static_cast<int64_t>(storage.nbytes()) / rows;
  const auto word = rowBytes % 8 == 0   ? at::kLong
                    : rowBytes % 4 == 0 ? at::kInt
                    : rowBytes % 2 == 0 ? at::kShort
                                        : at::kByte;
  return bytesOf(storage, rowBytes * rows).view(word).view({rows, -1});
}

// The contents of one padding row that is not a copy, for each word of `row`.
at::Tensor constantRow(const at::Tensor& row, const RowFacts& rows) {
  const bool ones = rows.live->padding == DeadRows::Nan && hasNan(rows.dtype);
  return at::full_like(row.view(at::kByte), ones ? 0xFF : 0).view(row.scalar_type());
}

}  // namespace

const SlotNumber Rows::kSlot = takeSlot();

void checkCount(const at::Tensor& tensor, const at::Tensor& rows) {
  TORCH_CHECK_VALUE(
      rows.layout() == at::kStrided, "ebb: mark_rows: rows must be a dense tensor; got ",
      rows.toString());
  TORCH_CHECK_TYPE(
      c10::isIntegralType(rows.scalar_type(), /*includeBool=*/false),
      "ebb: mark_rows: rows must have an integer dtype; got ", rows.toString());
  TORCH_CHECK_VALUE(
      rows.dim() <= 1 && rows.numel() >= 1,
      "ebb: mark_rows: rows must be one number or a 1-D tensor of counts to add up; got shape ",
      rows.sizes());
  TORCH_CHECK_VALUE(
      rows.device() == tensor.device(), "ebb: mark_rows: rows must be on x's device ",
      tensor.device(), ", so that the host need not wait for it; it is on ", rows.device());
}

// Adds up the counts in `rows`. Raises if one count is negative or so large that the sum could
// overflow, since the sum alone may look valid.
int64_t liveRows(const at::Tensor& tensor, const at::Tensor& rows) {
  const auto below = belowEverything();
  const at::Tensor counts = rows.to(at::kLong).contiguous();
  const c10::ArrayRef<int64_t> given(counts.const_data_ptr<int64_t>(), counts.numel());
  int64_t live = 0;
  for (const int64_t count : given) {
    live = live < 0 || count < 0 || count >= kMostRows ? -1 : live + count;
  }
  const int64_t most = tensor.dim() > 0 ? tensor.size(0) : 1;
  TORCH_CHECK_VALUE(
      live >= 0 && live <= most, "ebb: mark_rows: rows is ",
      live < 0 ? std::string("negative") : std::to_string(live),
      ", but must be from 0 to the first dimension of x, which has shape ", tensor.sizes());
  return live;
}

RowCount::RowCount(int64_t live) : dtype_(at::kLong) {
  const auto below = belowEverything();
  count = at::full({1}, live, at::kLong);
  kept = at::full({1}, std::max<int64_t>(live, 1), at::kLong);
}

// Runs few kernels, because a model may make a RowCount for each of its layers. The constructor
// does not check a single number: the code that uses the number checks it. An invalid number in a
// list makes the total -1, since the sum alone may look valid.
RowCount::RowCount(const at::Tensor& rows)
    : given_(rows.storage().getWeakStorageImpl()),
      version_(rows.is_inference() ? 0 : rows._version()),
      offset_(rows.storage_offset()),
      shape_(shapeOf(rows)),
      dtype_(rows.scalar_type()) {
  const auto below = belowEverything();
  const bool single = rows.numel() == 1;
  const at::Tensor counts = rows.to(at::kLong, /*non_blocking=*/false, /*copy=*/single);
  if (single) {
    count = counts.reshape({1});
  } else {
    // also true for a negative count, whose sign bit is set
    const at::Tensor bad = at::any(at::bitwise_and(counts, ~(kMostRows - 1)));
    count = counts.sum().masked_fill_(bad, -1).reshape({1});
  }
  kept = at::add(count, at::eq(count, 0));
  if (!kept.is_cpu() && c10::impl::hasDeviceGuardImpl(kept.device().type())) {
    maker_ = currentStream(kept.device());
  }
}

bool RowCount::is(int64_t live) const {
  return count.is_cpu() && *count.const_data_ptr<int64_t>() == live;
}

bool RowCount::isOf(const at::Tensor& rows) const {
  return !given_.expired() &&
         given_._unsafe_get_target() == rows.storage().unsafeGetStorageImpl() &&
         !rows.is_inference() && version_ == rows._version() && offset_ == rows.storage_offset() &&
         shape_ == shapeOf(rows) && dtype_ == rows.scalar_type();
}

int64_t RowCount::keptNow() {
  if (keptNow_ == 0) {
    const auto below = belowEverything();
    keptNow_ = kept.item<int64_t>();
  }
  return keptNow_;
}

const at::Tensor& RowCount::keptOnCurrent() const {
  if (maker_ && currentStream(kept.device()) != *maker_) {
    useOnCurrent(kept.storage(), *maker_);
  }
  return kept;
}

bool hasNan(c10::ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

void writePadding(const c10::Storage& storage, const RowFacts& rows) {
  const DeadRows padding = rows.live->padding;
  if (padding == DeadRows::None || storage.nbytes() < static_cast<size_t>(rows.total)) {
    return;
  }
  const auto below = belowEverything();
  at::Tensor all = wordsOf(storage, rows.total);
  const at::Tensor first = all.narrow(0, 0, 1);
  const at::Tensor dead = padding == DeadRows::Repeat ? first.clone() : constantRow(first, rows);
  const at::Tensor kept = rows.live->keptOnCurrent();
  at::Tensor numbers = at::empty({rows.total}, kept.options());  // a resize stops replays ahead
  at::arange_out(numbers, rows.total);
  const at::Tensor isLive = at::lt(numbers, kept);
  at::where_out(all, isLive.unsqueeze(1), all, dead);
}

bool isRowAfterRow(const at::Tensor& tensor) {
  return tensor.dim() >= 1 && tensor.numel() > 0 && tensor.storage_offset() == 0 &&
         tensor.is_contiguous() && tensor.storage().nbytes() == tensor.nbytes();
}

}  // namespace ebb
