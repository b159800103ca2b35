// The counters behind ebb::stats(): of ebb's objects that exist now, and of a step. A region counts
// without atomics, and adds its counts when it ends.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ebb/report.h"

namespace ebb {

// Note [Live counts]
// Objects are counted in the thread that makes or destroys them. Only the thread itself writes its
// share, so counting needs no atomic read-modify-write; each op would need four. Shares may be
// negative; the sum is the number of objects.
struct LiveCounts {
  std::atomic<int64_t> recipes{0};
  std::atomic<int64_t> handles{0};
  std::atomic<int64_t> regions{0};  // open outermost regions
};

// This thread's share.
LiveCounts& liveCounts();

inline void count(std::atomic<int64_t>& share, int64_t change) {
  share.store(share.load(std::memory_order_relaxed) + change, std::memory_order_relaxed);
}

// Note [What a step is]
// A step begins when the counters are reset, or when an outermost region is entered after a
// backward has used an earlier region. So after a backward, and until the next forward, the
// statistics show exactly the last forward and backward.
void statisticsRegionEntered();

// From now on `begins` is called when a step begins, with its number. Returns true, so that a
// plug-in can call this function when the library is loaded.
bool callWhenStepBegins(void (*begins)(uint64_t step));

void statisticsBackwardSeen();
void statisticsDemoted(const std::string& op);
void statisticsAdd(const std::string& region, const RegionCounters& counters);

// The transfers of the values of one op in one region, in bytes. The offload engine writes the
// members, on any thread.
struct TransferAccount {
  explicit TransferAccount(std::string given) : of(std::move(given)) {}
  const std::string of;  // "an output of aten::sin.default offloaded in region 'block'"
  std::atomic<uint64_t> sent{0};
  std::atomic<uint64_t> fetched{0};
  std::atomic<uint64_t> waitedByHost{0};
  std::atomic<uint64_t> waitedByDevice{0};
  std::atomic<uint64_t> refused{0};
  std::atomic<uint64_t> spilled{0};

  TransferCounters counters() const {
    static_assert(memberCount<TransferCounters>() == 6, "each has a counter here");
    return {sent, fetched, waitedByHost, waitedByDevice, refused, spilled};
  }
};
using TransferAccountPtr = std::shared_ptr<TransferAccount>;

// The account for this step's transfers of an op's values in a region. `op` is "input" for inputs.
TransferAccountPtr statisticsTransfers(const std::string& region, const std::string& op);

}  // namespace ebb
