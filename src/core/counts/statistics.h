// The counters behind ebb::stats(): of ebb's objects that exist now, and of a step. A region counts
// without atomics, and adds its counts when it ends.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

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

// From now on `add` adds a plug-in's part to each result of stats(). Returns true, too.
bool addToStats(void (*add)(Stats& stats));

// Set once the program asks for the time of replays.
extern std::atomic<bool> replaysAreTimed;

// Times a run of recipes, also if it ends by an exception. Costs one load of memory if replays are
// not timed.
class ReplayTimer {
 public:
  explicit ReplayTimer(bool ahead) : ahead_(ahead) {
    if (replaysAreTimed.load(std::memory_order_relaxed)) [[unlikely]] {
      began_ = Clock::now();
    }
  }
  ReplayTimer(const ReplayTimer&) = delete;
  ReplayTimer& operator=(const ReplayTimer&) = delete;
  ~ReplayTimer() {
    if (began_ != Clock::time_point()) [[unlikely]] {
      add(Clock::now() - began_);
    }
  }

 private:
  using Clock = std::chrono::steady_clock;

  void add(std::chrono::nanoseconds time) const;

  const bool ahead_;
  Clock::time_point began_{};  // zero: not timed
};

void statisticsBackwardSeen();
void statisticsDemoted(const std::string& op);
void statisticsAdd(const std::string& region, const RegionCounters& counters);

}  // namespace ebb
