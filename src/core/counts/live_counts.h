// Counts of ebb's objects that exist now, for ebb::stats().
#pragma once

#include <atomic>
#include <cstdint>

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

// The sum of one count over all threads.
int64_t liveTotal(std::atomic<int64_t> LiveCounts::* which);

}  // namespace ebb
