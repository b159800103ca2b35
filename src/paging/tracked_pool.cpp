#include "paging/tracked_pool.h"

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/eq.h>

#include <utility>

#include "memory/bytes.h"
#include "memory/capturing.h"

namespace ebb {

at::Tensor rowsIn(const c10::Storage& storage, PageRows rows) {
  return bytesOf(storage, rows.count * rows.bytes).view({rows.count, rows.bytes});
}

TrackedPool::SlotPtr TrackedPool::stash(
    const c10::Storage& storage, PageRows whole, const at::Tensor& count) {
  settleFreed();
  auto slot = std::make_shared<Slot>();
  slot->ticket = pages_.makeTicket(whole.count);
  used_ = true;
  captured_ |= isCapturing(options().device);
  if (options().isStack) {
    stack_.push_back(slot);
  }
  try {
    lane_.run(
        [&] { pages_.stash(slot->ticket, rowsIn(storage, whole), count); },
        {storage, count.storage(), slot->ticket.state.storage()});
  } catch (...) {
    free(slot);  // it may have taken pages
    throw;
  }
  return slot;
}

PageLane::Call TrackedPool::restore(
    const SlotPtr& slot, const c10::Storage& storage, PageFill fill) {
  settleFreed();
  const bool onTop = !stack_.empty() && stack_.back() == slot;
  fill.keepsPages = options().isStack && !onTop;
  PageLane::Call call = lane_.run(
      [&] {
        at::Tensor to = rowsIn(storage, slot->ticket.whole);
        pages_.restore(slot->ticket, to, fill);
      },
      {slot->ticket.state.storage()});
  used_ = true;
  slot->free = true;
  if (onTop) {
    stack_.pop_back();
  }
  return call;
}

void TrackedPool::free(const SlotPtr& slot) {
  if (!std::exchange(slot->free, true)) {
    freed_.push_back(slot);
  }
}

// In a stack only what is on top can be given back.
void TrackedPool::settleFreed() {
  auto freed = std::exchange(freed_, {});
  if (options().isStack) {
    freed.clear();
    while (!stack_.empty() && stack_.back()->free) {
      freed.push_back(std::move(stack_.back()));
      stack_.pop_back();
    }
  }
  for (const auto& slot : freed) {
    lane_.run([&] { pages_.giveBack(slot->ticket); }, {slot->ticket.state.storage()});
  }
}

void TrackedPool::assertGood() {
  lane_.run(
      [&] {
        const at::Tensor good = at::eq(pages_.flags().narrow(0, 0, 1), 0);
        at::_assert_async(good, "ebb: a page pool has no room, or a count of rows cannot be");
      },
      {});
}

// A CUDA graph that has it may have used it.
std::optional<PageLane::Call> TrackedPool::startReading() {
  if (!used_ && !captured_) {
    return std::nullopt;
  }
  if (!seen_.defined()) {
    const bool pinned = !options().device.is_cpu();
    seen_ = at::empty({2}, at::TensorOptions(at::kLong).pinned_memory(pinned));
  }
  return lane_.run([&] { seen_.copy_(pages_.flags(), true); }, {});
}

TrackedPool::Flags TrackedPool::readFlags() {
  const auto* flags = seen_.const_data_ptr<int64_t>();
  used_ = flags[0] != 0;  // else nothing changes until it is used again
  return {flags[0], flags[1] != 0};
}

void TrackedPool::reset() {
  lane_.run([&] { pages_.reset(); }, {});
  lane_.join();
  used_ = false;
}

}  // namespace ebb
