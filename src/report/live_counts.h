// How many of ebb's objects exist now, for ebb::stats().
#pragma once

#include <atomic>
#include <cstdint>

namespace ebb {

struct LiveCounts {
  std::atomic<int64_t> recipes{0};
  std::atomic<int64_t> handles{0};
  std::atomic<int64_t> regions{0};  // open outermost regions, on all threads
};

LiveCounts& liveCounts();

}  // namespace ebb
