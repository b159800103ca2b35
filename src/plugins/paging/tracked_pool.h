// A page pool, and what the host must know about the pool.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "plugins/paging/lane.h"
#include "plugins/paging/pool/pool.h"

namespace ebb {

// A pool's flags, as last copied to the host.
struct PoolFlags {
  at::Tensor seen;                          // pinned memory; zeros before the first reading
  std::optional<PageLane::Call> reading{};  // the end of the copy to `seen`; unset if none runs
  bool mayHaveChanged = false;  // used since the last reading began, or errors were read
  int64_t condemned = 0;        // error bits read last before the pool was dropped

  // Error bits of the last reading, see pool/layout.h.
  int64_t errors() const { return seen.const_data_ptr<int64_t>()[0]; }
  bool spilled() const { return seen.const_data_ptr<int64_t>()[1] != 0; }
};

// A pool whose calls run on its device's lane. Not thread-safe: the engine's lock guards the pool.
class TrackedPool {
 public:
  // The rows of one tensor.
  struct Slot {
    PageTicket ticket;
    PageLane::Call stashed;   // call that stashed the rows
    PageLane::Call restored;  // call that restores the rows
    bool free = false;        // the rows are not needed any more
  };
  using SlotPtr = std::shared_ptr<Slot>;

  TrackedPool(const PagePoolOptions& options, PageLane& lane);
  ~TrackedPool();

  // Copies the valid rows of `storage` to pages; `count` is their number.
  SlotPtr stash(const c10::Storage& storage, int64_t totalRows, const at::Tensor& count);

  // Copies the rows back to `storage`, with padding rows as in `fill`. Called in the capture in
  // which the rows were stashed, or outside of captures.
  void restore(const SlotPtr& slot, const c10::Storage& storage, PageFill fill);

  // Marks the rows of `slot` as not needed. Makes no device call, since a destructor may call this
  // on any thread; settleFreed() gives the pages back.
  void free(const SlotPtr& slot);

  // Gives the pages of freed slots back. Called by the next stash.
  void settleFreed();

  // Asserts on the device that the pool had no error.
  void assertGood();

  // If a CUDA graph uses the pool, the compute stream waits for all of the lane's calls so far, so
  // that later launches of the graph run after them. Called outside of captures.
  void letGraphsWait();

  // Error bits that the host can read without waiting: on the CPU all, elsewhere 0.
  int64_t errorsInSight() const;

  // True if the flags may differ from the last reading.
  bool mayHaveChanged() const {
    return flags_.mayHaveChanged || captured_;  // a CUDA graph with this pool may have been
                                                // replayed
  }

  // Starts to copy the flags to the host. The caller notes the end in flags().
  void startReading();
  PoolFlags& flags() { return flags_; }

  // True if a CUDA graph has recorded the pool's address.
  bool isCaptured() const { return captured_; }

  // Frees all pages and clears all errors.
  void reset();

  PageLane& lane() { return lane_; }
  const PagePool& pages() const { return *pages_; }
  const PagePoolOptions& options() const { return pages_->options(); }

 private:
  bool giveBack(const Slot& slot);

  PageLane& lane_;
  std::optional<PagePool> pages_;
  std::vector<SlotPtr> stack_;  // in a stack: slots that hold rows
  std::vector<SlotPtr> freed_;  // in other pools: slots for settleFreed()
  PoolFlags flags_;
  bool captured_ = false;
};
using TrackedPoolPtr = std::shared_ptr<TrackedPool>;

}  // namespace ebb
