#include "plugins/paging/tracked_pool.h"

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/eq.h>

#include <utility>

namespace ebb {

// Allocates the pool on the lane: the memory belongs to the lane's stream.
TrackedPool::TrackedPool(const PagePoolOptions& options, PageLane& lane)
    : lane_(lane), flags_{allocateForPool({2}, at::kLong, options.device).zero_()} {
  lane.give([&] { pages_.emplace(options); });
}

// Pinned memory belongs to no stream, so the destructor waits until no call uses the memory.
TrackedPool::~TrackedPool() {
  try {
    lane_.finish();
  } catch (...) {  // NOLINT(bugprone-empty-catch)
    // The device has failed before, so nothing runs there any more.
  }
}

TrackedPool::SlotPtr TrackedPool::stash(
    const c10::Storage& storage, int64_t totalRows, const at::Tensor& count) {
  settleFreed();
  auto slot = std::make_shared<Slot>();
  lane_.give([&] { slot->ticket = pages_->makeTicket(totalRows); });
  captured_ |= lane_.capture() != 0;
  flags_.mayHaveChanged = true;
  if (options().isStack) {
    stack_.push_back(slot);
  }
  try {
    slot->stashed =
        lane_.run([&] { pages_->stash(slot->ticket, storage, count); }, {storage, count.storage()});
  } catch (...) {
    free(slot);  // the failed call may have taken pages
    throw;
  }
  return slot;
}

void TrackedPool::restore(const SlotPtr& slot, const c10::Storage& storage, PageFill fill) {
  const bool onTop = !stack_.empty() && stack_.back() == slot;
  fill.keepsPages = options().isStack && !onTop;
  // The callers wait for the restore, so the lane need not hold `storage`.
  lane_.give([&] { pages_->restore(slot->ticket, storage, fill); }, /*afterCompute=*/true);
  slot->restored = lane_.mark();
  slot->free = true;
  if (onTop) {
    stack_.pop_back();
  }
}

void TrackedPool::free(const SlotPtr& slot) {
  slot->free = true;
  if (!options().isStack) {
    freed_.push_back(slot);
  }
}

// A stack can give back only the top.
void TrackedPool::settleFreed() {
  while (!stack_.empty() && stack_.back()->free && giveBack(*stack_.back())) {
    stack_.pop_back();
  }
  std::erase_if(freed_, [this](const SlotPtr& slot) { return giveBack(*slot); });
}

// Gives the pages of a freed slot back. Returns false for rows stashed outside of captures while a
// capture runs: the program may never launch the graph, so the next call outside of captures gives
// the pages back. A slot that was stashed in a capture takes pages only when the graph is launched,
// so only the graph gives these pages back.
bool TrackedPool::giveBack(const Slot& slot) {
  const uint64_t now = lane_.capture();
  const uint64_t of = slot.stashed.capture;
  if (of == now) {
    lane_.give([&] { pages_->giveBack(slot.ticket); }, /*afterCompute=*/captured_);
  }
  return of == now || of != 0;
}

// The assertion runs on the lane, after the stash that the assertion checks. It need not wait for
// CUDA graphs that were launched earlier: the stash has waited for them.
void TrackedPool::assertGood() {
  const auto assertOnDevice = [&] {
    const at::Tensor good = at::eq(pages_->flags().narrow(0, 0, 1), 0);
    at::_assert_async(
        good, "ebb: a page pool was too small, or mark_rows was given an invalid row count");
  };
  lane_.give(assertOnDevice);
}

// Graphs run on the compute stream.
void TrackedPool::letGraphsWait() {
  if (captured_ && lane_.capture() == 0) {
    lane_.wait(lane_.mark());
  }
}

int64_t TrackedPool::errorsInSight() const {
  return options().device.is_cpu() ? *pages_->flags().const_data_ptr<int64_t>() : 0;
}

void TrackedPool::startReading() {
  lane_.give([&] { flags_.seen.copy_(pages_->flags(), true); }, /*afterCompute=*/captured_);
}

void TrackedPool::reset() {
  lane_.give([&] { pages_->reset(); });
  lane_.joinAll(captured_);
}

}  // namespace ebb
