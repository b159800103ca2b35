// The valid rows of one storage, while they are in a pool or in a copy.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hooks/store.h"
#include "memory/arena.h"
#include "plugins/paging/log.h"
#include "plugins/paging/schedule.h"
#include "plugins/paging/tracked_pool.h"
#include "stores/rows.h"

namespace ebb {

struct PageStash;

// The stashes of one outermost region: a layer, on one micro-batch.
struct PageGroup {
  explicit PageGroup(std::string name) : region(std::move(name)) {}

  const std::string region;         // name of the region
  uint64_t step = 0;                // step of the stashes; 0: none yet, `forward` is not set
  bool cameBack = false;            // the group's backward has begun
  bool resident = false;            // see Note [Page schedules]
  ScheduleEntry forward{};          // entry in the step's schedule
  std::vector<PageStash*> stashes;  // living stashes, in the order of stashing
};
using PageGroupPtr = std::shared_ptr<PageGroup>;

// A storage to be stashed, as contiguous rows.
struct PageSource {
  const c10::Storage& storage;
  const RowFacts& rows;
  const char* op;  // op that made the storage, for messages
};

// The bytes of `storage` as contiguous rows.
at::Tensor rowsIn(const c10::Storage& storage, PageRows rows);

// Only the engine accesses the members, under the engine's lock.
struct PageStash final : Stash, InArena {
  enum class State : uint8_t {
    Resident,   // not paged: backward of the layer directly follows the forward
    Copied,     // valid rows are in memory of exactly their size
    Paged,      // valid rows are in a pool
    Returning,  // being restored
    Ahead,      // fetched before backward arrived: the engine still counts the stash as away
    Back,       // fetched: the engine is done with the stash
  };

  // The valid rows, if they were copied in a recorded step.
  struct Copied {
    int64_t rows;
    size_t logged;  // number in the step's PageLog
  };

  PageStash(const PageSource& source, PageGroupPtr of, uint64_t number);
  ~PageStash() override;

  c10::Storage fetch(const c10::Storage& living) override;
  c10::Storage fetchAhead(const c10::Storage& living) override;
  bool awaitsBackward() const override { return true; }
  // False if a fetch gives padding rows other contents than the forward's: see Note [Dead rows].
  bool isExact() const { return group->resident; }
  void beforeWrite() override;

  // True if a replay ahead may fetch the stash: see Note [Pages that come back ahead].
  bool mayComeAhead() const;

  size_t nbytes() const { return whole.count * whole.bytes; }

  // "the output of .. in region ..", for messages.
  std::string describe() const;

  // Throws c10::ValueError unless `live` is from 0 to the number of rows.
  void checkCount(int64_t live) const;

  // False if a CUDA graph capture separates the stash from its backward: see Note [Pages in a CUDA
  // graph].
  bool isHere() const;

  // Throws unless isHere().
  void checkPlace() const;

  // Throws if the pool was dropped and had an error.
  void checkNotCondemned() const;

  // If Copied: a storage with the valid rows, and padding rows as in `fill`.
  c10::Storage copyBack() const;

  const PageRows whole;
  const PoolKey kind;
  const PageFill fill;
  const PageGroupPtr group;
  const std::string op;  // that made the storage
  const uint64_t step;   // number of the step that made the stash
  State state = State::Resident;
  c10::Storage bytes;               // Resident, Returning, Back: all rows; Copied: the valid rows
  std::optional<c10::Stream> made;  // stream that made `bytes`, unless `bytes` is the original
                                    // storage
  std::optional<Copied> copied;     // unset if the rows went to a pool
  TrackedPoolPtr pool;              // if Paged or Returning
  TrackedPool::SlotPtr slot;        // slot in `pool`
};

}  // namespace ebb
