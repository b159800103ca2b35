#include "plugins/paging/pool/pool.h"

#include <ATen/ceil_div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>

#include <cstring>

#include "stream/stream.h"

namespace ebb {

std::string describePageErrors(int64_t errors) {
  const std::pair<int64_t, const char*> all[] = {
      {kPagesUsedUp, "a page pool was too small"},
      {kTooManyRows, "mark_rows was given more valid rows than the tensor has"},
      {kNegativeRows, "mark_rows was given a negative number of valid rows"},
      {kNotStashed, "a tensor was restored twice, or before it was paged"},
      {kStaleTicket, "a tensor was restored that was paged before the pool was reset"},
      {kAlreadyStashed, "a tensor was paged twice"},
  };
  std::string text;
  for (const auto& [bit, words] : all) {
    if ((errors & bit) != 0) {
      text += (text.empty() ? "" : "; ") + std::string(words);
    }
  }
  return text;
}

const char* remedyOfPageErrors(int64_t errors) {
  return errors == kPagesUsedUp ? "Clear them and run the step again, or use paging.run_step()."
                                : "Check the row counts given to mark_rows.";
}

// Turns every failure into NoPinnedMemory, because allocators of pinned memory throw many types.
at::Tensor allocateForPool(at::IntArrayRef shape, at::ScalarType dtype, c10::Device device) {
  const bool pinned = !device.is_cpu();
  try {
    return at::empty(shape, at::TensorOptions(dtype).pinned_memory(pinned));
  } catch (const std::exception& error) {
    const auto* ours = dynamic_cast<const c10::Error*>(&error);
    throw NoPinnedMemory(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
        ours != nullptr ? ours->what_without_backtrace() : error.what());
  }
}

PagePool::PagePool(const PagePoolOptions& options)
    : mover_(pageMoverOf(options.device)), options_(options) {
  TORCH_INTERNAL_ASSERT(
      options.rowBytes > 0 && options.pageRows > 0 && options.devicePages >= 0 &&
      options.hostPages >= 0 && (!options.isStack || options.pageRows == 1));
  const auto onDevice = at::TensorOptions().device(options.device);
  const int64_t pages[2] = {options.devicePages, options.hostPages};
  PagePoolState state{};
  for (int tier = 0; tier < 2; ++tier) {
    const int64_t nbytes = pages[tier] * options.pageRows * options.rowBytes;
    rows_[tier] = tier == 0 ? at::empty({nbytes}, onDevice.dtype(at::kByte))
                            : allocateForPool({nbytes}, at::kByte, options.device);
    free_[tier] = at::empty({options.isStack ? 0 : pages[tier]}, onDevice.dtype(at::kLong));
    state.tiers[tier].capacity = pages[tier];
    state.tiers[tier].rows = static_cast<unsigned char*>(rows_[tier].mutable_data_ptr());
    state.tiers[tier].free = free_[tier].mutable_data_ptr<int64_t>();
  }
  state.pageRows = options.pageRows;
  state.rowBytes = options.rowBytes;
  state.isStack = options.isStack ? 1 : 0;
  at::Tensor onCpu = at::empty({sizeof state}, at::kByte);
  std::memcpy(onCpu.mutable_data_ptr(), &state, sizeof state);
  state_ = onCpu.to(options.device);
  reset();
  warmUp();
}

// Launches the kernels once, because CUDA loads a kernel at its first launch, and must not load a
// kernel during a capture.
void PagePool::warmUp() {
  const auto onDevice = at::TensorOptions().device(options_.device);
  PageTicket ticket = makeTicket(1);
  at::Tensor row = at::zeros({1, options_.rowBytes}, onDevice.dtype(at::kByte));
  stash(ticket, row.storage(), at::zeros({1}, onDevice.dtype(at::kLong)));
  restore(ticket, row.storage(), {PageDeadRows::FirstRow, 0, 0, true});
  giveBack(ticket);
}

PageTicket PagePool::makeTicket(int64_t totalRows) const {
  const int64_t pages = options_.isStack ? 0 : at::ceil_div(totalRows, options_.pageRows);
  constexpr int64_t kWords = sizeof(PageTicketState) / sizeof(int64_t);
  return {
      at::zeros({kWords + pages}, at::TensorOptions().device(options_.device).dtype(at::kLong)),
      {totalRows, options_.rowBytes}};
}

PageTicketState* PagePool::stateOf(const PageTicket& ticket, const c10::Storage& storage) const {
  const auto nbytes = static_cast<size_t>(ticket.whole.count * options_.rowBytes);
  TORCH_INTERNAL_ASSERT(storage.device() == options_.device && storage.nbytes() >= nbytes);
  return ticket.get();
}

void PagePool::stash(PageTicket& ticket, const c10::Storage& source, const at::Tensor& rows) {
  const c10::DeviceGuard here(options_.device);
  TORCH_INTERNAL_ASSERT(
      rows.scalar_type() == at::kLong && rows.numel() == 1 && rows.device() == options_.device);
  mover_.stash(
      pool(), stateOf(ticket, source), ticket.whole, source.data(), rows.const_data_ptr<int64_t>(),
      stream());
}

void PagePool::restore(PageTicket& ticket, const c10::Storage& destination, PageFill fill) {
  const c10::DeviceGuard here(options_.device);
  mover_.restore(
      pool(), stateOf(ticket, destination), ticket.whole, destination.mutable_data(), fill,
      stream());
}

void PagePool::giveBack(const PageTicket& ticket) {
  const c10::DeviceGuard here(options_.device);
  mover_.giveBack(pool(), ticket.get(), stream());
}

at::Tensor PagePool::flags() const {
  constexpr int64_t kWord = sizeof(int64_t);
  static_assert(offsetof(PagePoolState, errors) % kWord == 0);
  static_assert(offsetof(PagePoolState, spilled) == offsetof(PagePoolState, errors) + kWord);
  constexpr int64_t kPlace = offsetof(PagePoolState, errors) / kWord;
  return state_.view(at::kLong).narrow(0, kPlace, 2);
}

size_t PagePool::deviceBytes() const {
  return rows_[0].nbytes() + free_[0].nbytes() + free_[1].nbytes() + state_.nbytes();
}

size_t PagePool::hostBytes() const { return rows_[1].nbytes(); }

void PagePool::reset() {
  const c10::DeviceGuard here(options_.device);
  mover_.reset(pool(), stream());
}

PagePoolState* PagePool::pool() const {
  return static_cast<PagePoolState*>(state_.mutable_data_ptr());
}

void* PagePool::stream() const {
  const c10::Device device = options_.device;
  return device.is_cpu() ? nullptr : currentStream(device).native_handle();
}

}  // namespace ebb
