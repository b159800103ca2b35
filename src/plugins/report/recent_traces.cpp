#include "plugins/report/recent_traces.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <iterator>
#include <mutex>
#include <vector>

#include "ebb/report.h"

namespace ebb {
namespace {

struct RecentTraces {
  std::mutex mutex;                 // guards all members below
  std::deque<StepTracePtr> traces;  // the current step's trace is last
  uint64_t step = 0;
  StepTracePtr profile;            // replaces the current step's trace; null: no profile
  std::atomic<uint32_t> steps{0};  // number of kept reports; 0: reports are not recorded
  std::atomic<bool> on{false};     // reports or a profile are recorded

  // Begins a trace for the current step, and moves surplus traces into `old`. The caller
  // destroys `old` after unlocking: see Note [Locks and the GIL].
  void begin(std::vector<StepTracePtr>& old) {
    traces.push_back(std::make_shared<StepTrace>(step));
    while (traces.size() > steps.load() + size_t{1}) {  // 1 more: the last may be incomplete
      // Traces without regions go first, such as those of steps that a profile recorded.
      const auto last = std::prev(traces.end());
      auto next = std::find_if(traces.begin(), last, std::mem_fn(&StepTrace::isEmpty));
      next = next == last ? traces.begin() : next;
      old.push_back(std::move(*next));
      traces.erase(next);
    }
  }
};

RecentTraces& recentTraces() {
  static auto* instance = new RecentTraces;
  return *instance;
}

}  // namespace

StepTracePtr currentTrace() {
  RecentTraces& all = recentTraces();
  if (!all.on.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  std::vector<StepTracePtr> old;
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.profile) {
    return all.profile;
  }
  if (all.traces.empty()) {
    all.begin(old);
  }
  return all.traces.back();
}

void putTraceInPlace(StepTracePtr profile) {
  RecentTraces& all = recentTraces();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.profile.swap(profile);  // the previous profile is destroyed after the lock is released
  all.on.store(all.profile || all.steps.load() > 0);
}

void traceStepBegins(uint64_t step) {
  RecentTraces& all = recentTraces();
  std::vector<StepTracePtr> old;
  std::lock_guard<std::mutex> lock(all.mutex);
  all.step = step;
  if (all.steps.load() > 0) {
    all.begin(old);
  }
}

uint32_t setReporting(uint32_t steps) {
  RecentTraces& all = recentTraces();
  std::vector<StepTracePtr> old;
  std::lock_guard<std::mutex> lock(all.mutex);
  const uint32_t before = all.steps.exchange(steps);
  all.on.store(steps > 0 || all.profile);
  if (before == 0 && steps > 0) {
    all.begin(old);  // earlier records of this step belong to another report
  }
  return before;
}

bool isReporting() { return recentTraces().steps.load(std::memory_order_relaxed) > 0; }

void clearReports() {
  std::deque<StepTracePtr> old;
  std::lock_guard<std::mutex> lock(recentTraces().mutex);
  old.swap(recentTraces().traces);
}

std::vector<Report> reports() {
  std::deque<StepTracePtr> traces;
  {
    std::lock_guard<std::mutex> lock(recentTraces().mutex);
    traces = recentTraces().traces;
  }
  std::vector<Report> all;
  for (const StepTracePtr& trace : traces) {
    all.push_back(trace->report());
  }
  return all;
}

}  // namespace ebb
