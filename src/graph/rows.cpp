#include "graph/rows.h"

#include <ATen/ops/any.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "graph/geometry.h"
#include "graph/value.h"
#include "residency/memory.h"

namespace ebb {
namespace {

// Whether a reduction's dimensions leave the rows alone. None given: it reduces all.
bool leavesRows(const c10::IValue& dims, int64_t dimensions) {
  const auto leaves = [&](int64_t dim) { return dim != 0 && dim != -dimensions; };
  if (dims.isInt()) {
    return leaves(dims.toInt());
  }
  if (!dims.isIntList()) {
    return false;
  }
  const auto list = dims.toIntVector();
  return !list.empty() && std::all_of(list.begin(), list.end(), leaves);
}

}  // namespace

RowCount::RowCount(const at::Tensor& tensor, const at::Tensor& rows)
    : given_(rows.storage().getWeakStorageImpl()), dtype_(rows.scalar_type()) {
  TORCH_CHECK_TYPE(
      c10::isIntegralType(rows.scalar_type(), /*includeBool=*/false),
      "ebb: mark_rows takes a tensor of integers; got ",
      rows.toString());
  TORCH_CHECK_VALUE(
      rows.dim() <= 1 && rows.numel() >= 1,
      "ebb: mark_rows takes one number of rows, or a list of counts whose sum it is; got shape ",
      rows.sizes());
  TORCH_CHECK_VALUE(
      rows.device() == tensor.device(),
      "ebb: mark_rows takes a count on the tensor's device, ",
      tensor.device(),
      ", so that nobody waits for it; it is on ",
      rows.device());
  version_ = rows.is_inference() ? 0 : rows._version();
  offset_ = rows.storage_offset();
  numel_ = rows.numel();
  const auto below = belowEverything();
  const at::Tensor counts = rows.to(at::kLong, /*non_blocking=*/false, /*copy=*/true);
  // A negative one among several must not hide in the sum.
  count =
      numel_ == 1
          ? counts.reshape({1})
          : at::where(
                at::any(at::lt(counts, 0)), at::scalar_tensor(-1, counts.options()), counts.sum())
                .reshape({1});
}

bool RowCount::isOf(const at::Tensor& rows) const {
  const auto* storage = rows.storage().unsafeGetStorageImpl();
  return !given_.expired() && given_._unsafe_get_target() == storage && !rows.is_inference() &&
         version_ == rows._version() && offset_ == rows.storage_offset() &&
         numel_ == rows.numel() && dtype_ == rows.scalar_type();
}

void RowCount::check(const at::Tensor& tensor) const {
  if (count.is_cpu()) {
    const int64_t live = *count.const_data_ptr<int64_t>();
    const int64_t most = tensor.dim() > 0 ? tensor.size(0) : 1;
    TORCH_CHECK_VALUE(
        live >= 0 && live <= most,
        "ebb: mark_rows: ",
        live < 0 ? std::string("a negative number of") : std::to_string(live),
        " rows cannot live in a tensor of shape ",
        tensor.sizes());
  }
}

bool isRowAfterRow(const at::Tensor& tensor) {
  return tensor.dim() >= 1 && tensor.numel() > 0 && tensor.storage_offset() == 0 &&
         tensor.is_contiguous() && tensor.storage().nbytes() == tensor.nbytes();
}

int64_t rowsShown(const at::Tensor& tensor, const Rows& rows, size_t nbytes) {
  if (tensor.dim() == 0 || tensor.size(0) == 0 || tensor.size(0) % rows.most != 0) {
    return 0;
  }
  const int64_t shown = tensor.size(0);
  const int64_t each = static_cast<int64_t>(nbytes) / shown;  // bytes of a row as it is shown
  const int64_t item = tensor.itemsize();
  int64_t end = tensor.storage_offset() + 1;  // of what is shown of the first row, in elements
  for (int64_t d = 1; d < tensor.dim(); ++d) {
    end += (tensor.size(d) - 1) * tensor.stride(d);
  }
  const bool inStep = shown == 1 || tensor.stride(0) * item == each;
  return inStep && end * item <= each ? shown : 0;
}

void RowFlow::add(const at::Tensor& tensor, size_t argument, const Value* value) {
  extents_.push_back({tensor.dim(), tensor.dim() > 0 ? tensor.size(0) : 1});
  if (value == nullptr || value->rows == nullptr) {
    return;
  }
  const Rows& rows = *value->rows;
  lossy_ |= rows.lossy;
  const int64_t shown = rowsShown(tensor, rows, value->nbytes);
  const bool first = live_ == nullptr;
  if (first) {
    live_ = rows.live;
    most_ = rows.most;
    leading_ = shown;
    dimensions_ = tensor.dim();
  }
  apart_ = apart_ && shown > 0 && keepsApart(tensor, argument) && rows.live == live_ &&
           rows.most == most_ && shown == leading_ && tensor.dim() == dimensions_;
}

// Broadcasting must not give rows a dimension in front, nor copies.
bool RowFlow::keepsApart() const {
  const auto fits = [&](const Extent& extent) {
    return extent.dimensions < dimensions_ || (extent.dimensions == dimensions_ &&
                                               (extent.leading == leading_ || extent.leading == 1));
  };
  return apart_ &&
         (op_.rows != RowRule::EachRow || std::all_of(extents_.begin(), extents_.end(), fits));
}

bool RowFlow::keepsApart(const at::Tensor& tensor, size_t argument) const {
  switch (op_.rows) {
    case RowRule::Unknown:
    case RowRule::ShapeOnly:
      return false;
    case RowRule::EachRow:
      return true;
    case RowRule::OneArgument:
      return static_cast<int16_t>(argument) == op_.rowArgument;
    case RowRule::Batches:
      return tensor.dim() == 3;
    case RowRule::TrailingDims:
      return static_cast<int16_t>(argument) == 0 && arguments_[op_.rowArgument].isIntList() &&
             static_cast<int64_t>(arguments_[op_.rowArgument].toIntVector().size()) < tensor.dim();
    case RowRule::AlongDims:
      return leavesRows(arguments_[op_.rowArgument], tensor.dim());
  }
  return false;
}

std::unique_ptr<Rows> RowFlow::of(const at::Tensor& result) const {
  const bool has = live_ && keepsApart() && isRowAfterRow(result) && result.size(0) == leading_ &&
                   result.device() == live_->count.device() &&
                   (op_.rows != RowRule::EachRow || result.dim() == dimensions_);
  return has ? std::make_unique<Rows>(Rows{live_, most_, result.scalar_type(), lossy_}) : nullptr;
}

std::unique_ptr<Rows> RowFlow::ofWritten(const at::Tensor& argument, const Value& before) const {
  if (before.rows && live_ && keepsApart()) {
    return std::make_unique<Rows>(Rows{live_, most_, before.rows->dtype, lossy_});
  }
  return before.rows ? nullptr : of(argument);
}

}  // namespace ebb
