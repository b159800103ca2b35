#include "graph/rows.h"

#include <ATen/ops/any.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/lt.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/where.h>

#include "intercept/key.h"

namespace ebb {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 40;

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
  shape_ = rows.sizes().vec();
  shape_.insert(shape_.end(), rows.strides().begin(), rows.strides().end());
  const auto below = belowEverything();
  const at::Tensor counts = rows.to(at::kLong, /*non_blocking=*/false, /*copy=*/true).reshape({-1});
  // A negative one must not hide in the sum, nor one so large that the sum turns negative.
  const at::Tensor bad = at::any(at::lt(counts, 0)).logical_or(at::any(at::gt(counts, kMostRows)));
  count = at::where(bad, at::scalar_tensor(-1, counts.options()), counts.sum()).reshape({1});
  kept = at::where(at::eq(count, 0), at::scalar_tensor(1, counts.options()), count);
}

bool RowCount::isOf(const at::Tensor& rows, const RowCount& now) const {
  if (count.is_cpu() && now.count.is_cpu()) {  // nobody need wait for the number
    return *count.const_data_ptr<int64_t>() == *now.count.const_data_ptr<int64_t>();
  }
  std::vector<int64_t> shape = rows.sizes().vec();
  shape.insert(shape.end(), rows.strides().begin(), rows.strides().end());
  return !given_.expired() &&
         given_._unsafe_get_target() == rows.storage().unsafeGetStorageImpl() &&
         !rows.is_inference() && version_ == rows._version() && offset_ == rows.storage_offset() &&
         shape_ == shape && dtype_ == rows.scalar_type();
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

}  // namespace ebb
