// One storage's live rows, while they are away.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ebb/paging.h"
#include "memory/arena.h"
#include "memory/stash.h"
#include "paging/lane.h"
#include "paging/log.h"
#include "paging/schedule.h"
#include "paging/tracked_pool.h"

namespace ebb {

struct PageStash;

// What one outermost region has stashed: a layer, of one micro-batch.
struct PageGroup {
  explicit PageGroup(std::string name) : region(std::move(name)) {
  }

  const std::string region;         // its name
  uint64_t step = 0;                // in which it was stashed
  bool entered = false;             // `forward` is known
  bool cameBack = false;            // its backward has begun
  bool resident = false;            // see Note [Page schedules]
  ScheduleEntry forward{};          // in the step's schedule
  std::vector<PageStash*> stashes;  // that exist, in the order of stashing
};
using PageGroupPtr = std::shared_ptr<PageGroup>;

// Rows that are to be stashed: all of a storage, row after row.
struct PageSource {
  const c10::Storage& storage;
  c10::ScalarType dtype;    // of what is in it
  const at::Tensor& count;  // of live rows: one int64, on the storage's device
  int64_t totalRows;        // live and dead
  const char* op;           // that made it, for messages
  bool showDeadRows;        // dead rows come back as bytes that show, see Note [Dead rows]

  // For messages.
  std::string describe(const PageGroup& group) const;

  // Throws c10::ValueError if so many of its rows cannot live.
  void checkCount(int64_t live, const PageGroup& group) const;
};

// Only the engine looks inside, under its lock, so its members are the engine's. They are
// many, since one stash is one block of memory.
struct PageStash final : Stash, InArena {
  enum class State : uint8_t {
    Resident,   // the storage itself is held: its backward comes next
    Copied,     // live rows are in memory of their size
    Paged,      // live rows are in a pool
    Returning,  // being restored
    Ahead,      // fetched, and backward is not there yet: the engine counts it as away
    Back,       // fetched: the engine has nothing to do with it any more
  };

  PageStash(const PageSource& source, PageGroupPtr of, uint64_t number);
  ~PageStash() override;

  c10::Storage fetch(const c10::Storage& living) override;
  c10::Storage fetchAhead(const c10::Storage& living) override;
  bool awaitsBackward() const override {
    return true;
  }
  void beforeWrite() override;

  PoolKey kind() const {
    return {device, dtype, whole.bytes};
  }
  PageRows live() const {
    return {liveRows, whole.bytes};
  }

  // How it is to come back.
  PageFill fill(DeadRows deadRows) const;
  bool hasNan() const;

  // Whether it may be fetched before backward asks: see Note [Pages that come back ahead].
  bool mayComeAhead() const;

  // Throws if its pool is gone, and had an error.
  void checkNotCondemned() const;

  // If Copied: live rows and dead ones, as `fill` says.
  c10::Storage copyBack(PageFill fill) const;

  const size_t nbytes;
  const c10::Device device;
  const c10::ScalarType dtype;
  const PageRows whole;
  const bool showDeadRows;
  const PageGroupPtr group;
  const uint64_t step;  // in which it was stashed
  State state = State::Resident;
  c10::Storage bytes;               // Resident, Returning, Back: all; Copied: the live rows
  int64_t liveRows = 0;             // if Copied
  std::optional<c10::Stream> made;  // the stream for which `bytes` were, if not always there
  std::optional<size_t> logged;     // its number in the step's PageLog
  TrackedPoolPtr pool;              // if Paged or Returning
  TrackedPool::SlotPtr slot;        // there
  PageLane::Call restoring;         // the call that does so
};

}  // namespace ebb
