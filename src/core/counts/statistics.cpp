#include "counts/statistics.h"

#include <atomic>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "support/leaked.h"
#include "support/thread_owned.h"

namespace ebb {
namespace {

struct Shares {
  std::mutex mutex;
  std::deque<LiveCounts> all;          // never shrinks: a thread that ends leaves its counts
  std::vector<LiveCounts*> ownerless;  // shares of ended threads, which new threads take over
};

Shares& shares() { return leaked<Shares>(); }

// See Note [Static TLS]
[[gnu::tls_model("initial-exec")]] constinit thread_local LiveCounts* tlsShare = nullptr;

void leaveShare(void*) {
  std::lock_guard<std::mutex> lock(shares().mutex);
  shares().ownerless.push_back(std::exchange(tlsShare, nullptr));
}

[[gnu::noinline]] LiveCounts& takeShare() {
  {
    std::lock_guard<std::mutex> lock(shares().mutex);
    if (shares().ownerless.empty()) {
      tlsShare = &shares().all.emplace_back();
    } else {
      tlsShare = shares().ownerless.back();
      shares().ownerless.pop_back();
    }
  }
  atThreadExit(&leaveShare, nullptr);
  return *tlsShare;
}

struct Books {
  std::mutex mutex;                       // guards step and before
  Stats step;                             // counts of the current step
  std::atomic<bool> backwardSeen{false};  // the next outermost region begins a step
  Totals before;                          // counts of the steps before the current one
  std::atomic<uint64_t> replayTime{0};    // nanoseconds
  std::atomic<uint64_t> aheadTime{0};     // nanoseconds
};

Books& books() { return leaked<Books>(); }

// Filled while the library is loaded, so it needs no lock.
struct PlugIns {
  std::vector<void (*)(uint64_t)> stepBegins;
  std::vector<void (*)(Stats&)> addTo;
};

PlugIns& plugIns() { return leaked<PlugIns>(); }

// Called when the current step ends, under the mutex.
void addToTotals(Books& shared, bool hadBackward) {
  shared.before.counters += shared.step.total;
  shared.before.passes += hadBackward ? 1 : 0;
}

void tellStepBegins(uint64_t step) {
  for (const auto begins : plugIns().stepBegins) {
    begins(step);
  }
}

}  // namespace

std::atomic<bool> replaysAreTimed{false};

LiveCounts& liveCounts() { return tlsShare != nullptr ? *tlsShare : takeShare(); }

RegionCounters& RegionCounters::operator+=(const RegionCounters& other) {
  forEachField<RegionCounters>([&](auto field) { this->*field.member += other.*field.member; });
  return *this;
}

bool callWhenStepBegins(void (*begins)(uint64_t step)) {
  plugIns().stepBegins.push_back(begins);
  return true;
}

bool addToStats(void (*add)(Stats& stats)) {
  plugIns().addTo.push_back(add);
  return true;
}

void statisticsRegionEntered() {
  Books& shared = books();
  if (!shared.backwardSeen.load(std::memory_order_relaxed)) {
    return;
  }
  uint64_t step = 0;
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    if (!shared.backwardSeen.exchange(false)) {
      return;
    }
    addToTotals(shared, true);
    shared.step.regions.clear();
    shared.step.total = {};
    step = ++shared.step.passes;
  }
  tellStepBegins(step);
}

void statisticsBackwardSeen() {
  Books& shared = books();
  if (!shared.backwardSeen.load(std::memory_order_relaxed)) {
    shared.backwardSeen.store(true, std::memory_order_relaxed);
  }
}

void statisticsDemoted(const std::string& op) {
  Books& shared = books();
  std::lock_guard<std::mutex> lock(shared.mutex);
  shared.step.demotedOps.push_back(op);
}

void statisticsAdd(const std::string& region, const RegionCounters& counters) {
  Books& shared = books();
  std::lock_guard<std::mutex> lock(shared.mutex);
  shared.step.regions[region] += counters;
  shared.step.total += counters;
}

Stats stats() {
  Books& shared = books();
  Stats now;
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    now = shared.step;
  }
  for (const auto add : plugIns().addTo) {
    add(now);
  }
  std::lock_guard<std::mutex> lock(shares().mutex);
  for (const LiveCounts& share : shares().all) {
    now.liveRecipes += share.recipes.load(std::memory_order_relaxed);
    now.liveHandles += share.handles.load(std::memory_order_relaxed);
    now.openRegions += share.regions.load(std::memory_order_relaxed);
  }
  return now;
}

Totals totals() {
  Books& shared = books();
  Totals now;
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    now = shared.before;
    now.counters += shared.step.total;
    now.passes += shared.backwardSeen.load() ? 1 : 0;
  }
  now.replayNanoseconds = shared.replayTime.load();
  now.replayAheadNanoseconds = shared.aheadTime.load();
  return now;
}

void timeReplays() { replaysAreTimed.store(true); }

void ReplayTimer::add(std::chrono::nanoseconds time) const {
  (ahead_ ? books().aheadTime : books().replayTime) += static_cast<uint64_t>(time.count());
}

void resetStats() {
  Books& shared = books();
  {
    std::lock_guard<std::mutex> lock(shared.mutex);
    addToTotals(shared, shared.backwardSeen.exchange(false));
    shared.step = {};
  }
  tellStepBegins(0);
}

}  // namespace ebb
