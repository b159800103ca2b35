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
class TrackedPool {
 public:
  // The rows of one tensor.
  struct Slot {
    PageTicket ticket;
    bool free = false;  // nobody needs them any more
  };
  using SlotPtr = std::shared_ptr<Slot>;

  TrackedPool(const PagePoolOptions& options, PageLane& lane) : pages_(options), lane_(lane) {
  }

  // Copies the live rows of `storage`; `count` says how many live.
  SlotPtr stash(const c10::Storage& storage, PageRows whole, const at::Tensor& count);

  // Copies them back to `storage`, as `fill` says.
  PageLane::Call restore(const SlotPtr& slot, const c10::Storage& storage, PageFill fill);

  // Nobody needs its rows any more. They are given back by settleFreed(), which the next call does:
  // this may be called by a destructor, on any thread.
  void free(const SlotPtr& slot);
  void settleFreed();

  // Asserts on the device that there was no error.
  void assertGood();

  // Starts to copy its flags to the host; nothing if they cannot have changed. Whoever has waited
  // for the copy reads them.
  struct Flags {
    int64_t errors = 0;  // bits, see pool/layout.h
    bool spilled = false;
  };
  std::optional<PageLane::Call> startReading();
  Flags readFlags();

  // Error bits that were read last; 0 before.
  int64_t errorsSeen() const {
    return seen_.defined() ? seen_.const_data_ptr<int64_t>()[0] : 0;
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
    return pages_;
  }
  const PagePoolOptions& options() const {
    return pages_.options();
  }

 private:
  PagePool pages_;
  PageLane& lane_;
  std::vector<SlotPtr> stack_;  // in a stack: those that hold rows
  std::vector<SlotPtr> freed_;  // to be given back at the next call
  at::Tensor seen_;             // its flags on the host; pinned memory
  bool used_ = false;           // since its flags were read last
  bool captured_ = false;
  int64_t condemned_ = 0;
};
using TrackedPoolPtr = std::shared_ptr<TrackedPool>;

}  // namespace ebb
