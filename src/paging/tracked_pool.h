// A page pool, and what must be known of it on the host.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "paging/lane.h"
#include "paging/pool/pool.h"

namespace ebb {

// The bytes of `storage`, row after row.
at::Tensor rowsIn(const c10::Storage& storage, PageRows rows);

// Its calls run on its device's lane. Not thread-safe: the engine's lock guards it.
// Its methods are many: the ways of a tensor, and what errors it had.
class TrackedPool {
 public:
  // The rows of one tensor.
  struct Slot {
    PageTicket ticket;
    PageLane::Call stashed;    // the call that did so
    uint64_t givenBackIn = 0;  // a capture that has done so, if it was stashed before
    bool free = false;         // nobody needs them any more
  };
  using SlotPtr = std::shared_ptr<Slot>;

  TrackedPool(const PagePoolOptions& options, PageLane& lane);
  TrackedPool(const TrackedPool&) = delete;
  TrackedPool& operator=(const TrackedPool&) = delete;
  ~TrackedPool();

  // Copies the live rows of `storage`; `count` says how many live.
  SlotPtr stash(const c10::Storage& storage, PageRows whole, const at::Tensor& count);

  // Copies them back to `storage`, as `fill` says.
  PageLane::Call restore(const SlotPtr& slot, const c10::Storage& storage, PageFill fill);

  // Nobody needs its rows any more. They are given back by settleFreed(), which the next stash
  // does: this may be called by a destructor, on any thread.
  void free(const SlotPtr& slot);
  void settleFreed();

  // Asserts on the device that there was no error.
  void assertGood();

  // What a CUDA graph that has it does next comes after all that it was given, outside captures.
  void letGraphsWait();

  // Adds error bits to a tensor of one int64; on the lane.
  void addErrors(at::Tensor& errors) const;

  // Error bits, where the host sees them: on the CPU. Elsewhere 0.
  int64_t errorsInSight() const;

  // Starts to copy its flags to the host, and says so with `copied`, which whoever reads them has
  // waited for.
  struct Flags {
    int64_t errors = 0;  // bits, see pool/layout.h
    bool spilled = false;
  };
  bool mayHaveChanged() const {
    return used_ || captured_;  // a CUDA graph that has it may have used it
  }
  void startReading();
  void noteReading(PageLane::Call copied);
  const std::optional<PageLane::Call>& reading() const {
    return reading_;
  }
  Flags readFlags();

  // Error bits that were read last; 0 before.
  int64_t errorsSeen() const {
    return seen_.const_data_ptr<int64_t>()[0];
  }

  // Its memory is given up. Error bits it had then; 0 if that has not come.
  void condemn() {
    condemned_ = errorsSeen();
  }
  int64_t condemned() const {
    return condemned_;
  }

  // Whether a CUDA graph has its address.
  bool isCaptured() const {
    return captured_;
  }

  // All pages are free again and errors forgotten.
  void reset();

  PageLane& lane() {
    return lane_;
  }
  const PagePool& pages() const {
    return *pages_;
  }
  const PagePoolOptions& options() const {
    return pages_->options();
  }

 private:
  PageLane::After afterGraphs() const;
  void giveBack(const SlotPtr& slot, std::vector<SlotPtr>& stays);

  PageLane& lane_;
  std::optional<PagePool> pages_;
  std::vector<SlotPtr> stack_;             // in a stack: those that hold rows
  std::vector<SlotPtr> freed_;             // given back by settleFreed()
  std::vector<SlotPtr> kept_;              // a CUDA graph has their addresses
  at::Tensor seen_;                        // its flags on the host; pinned memory
  std::optional<PageLane::Call> reading_;  // they are being copied there
  bool used_ = false;                      // since that began last
  bool captured_ = false;
  int64_t condemned_ = 0;
};
using TrackedPoolPtr = std::shared_ptr<TrackedPool>;

}  // namespace ebb
