#include "ebb/profile.h"

#include <c10/util/Exception.h>
#include <c10/util/Logging.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "allocator/in_use.h"
#include "plugins/report/recent_traces.h"
#include "plugins/report/step_trace.h"

namespace ebb {
namespace {

const auto kKind = c10::DebugInfoKind::PROFILER_STATE;

// A log of the allocations and frees of a thread, as torch's allocators report them. An installed
// log records the allocations on its thread, and on the threads that run the thread's backward. The
// log takes the place of torch's profiler, which then records nothing and must not be started: the
// profiler's callbacks would take the log for their own state. Without a trace, a log only counts
// the peak: see Note [Peaks on an accelerator].
class MemoryLog final : public torch::profiler::impl::ProfilerStateBase {
 public:
  explicit MemoryLog(StepTracePtr trace)
      : ProfilerStateBase(
            torch::profiler::impl::ProfilerConfig(
                torch::profiler::impl::ProfilerState::Disabled, false, true)),
        trace(std::move(trace)) {}

  // True if torch's profiler or another log is installed on this thread.
  static bool isTaken() { return c10::ThreadLocalDebugInfo::get(kKind) != nullptr; }

  void install(std::shared_ptr<MemoryLog> self) {
    // While a profiler or log is installed, torch's CPU allocator warns if a block that was
    // allocated earlier is freed. A log expects such blocks.
    logLevelBefore_ = FLAGS_caffe2_log_level;
    FLAGS_caffe2_log_level = std::max(logLevelBefore_, static_cast<int>(c10::GLOG_ERROR));
    beginNotingAllocations();
    c10::ThreadLocalDebugInfo::_push(kKind, std::move(self));
  }

  // Stops recording. False if the log is installed on another thread, where it stays installed.
  bool close() {
    if (!closed_.exchange(true)) {
      endNotingAllocations();
      FLAGS_caffe2_log_level = logLevelBefore_;
    }
    const bool isHere = c10::ThreadLocalDebugInfo::get(kKind) == this;
    if (isHere) {
      c10::ThreadLocalDebugInfo::_pop(kKind);
    }
    return isHere;
  }

  bool isProfile() const { return trace != nullptr; }

  std::vector<ProfileAllocation> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(events_, {});
  }

  void reportMemoryUsage(
      void* address, int64_t bytes, size_t allocated, size_t, c10::Device device) override {
    if (closed_.load(std::memory_order_relaxed) || device.type() != device_.type()) {
      return;
    }
    if (device == device_ && !device.is_cpu()) {
      noteAllocated(allocated);
    }
    if (!trace) {
      return;
    }
    const double time = static_cast<double>(trace->now()) * 1e-6;
    std::lock_guard<std::mutex> lock(mutex_);
    events_.push_back({time, reinterpret_cast<uintptr_t>(address), bytes});
  }

  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }

  const StepTracePtr trace;  // of the same profile; the log uses its clock. Null: no profile

 private:
  const c10::Device device_ = deviceInUse();
  std::atomic<bool> closed_{false};
  int logLevelBefore_ = 0;  // torch's level, which is higher while a log is installed
  std::mutex mutex_;        // guards all members below
  std::vector<ProfileAllocation> events_;
};

// The log that records now, of a profile or of beginCounting().
struct Current {
  std::mutex mutex;                // guards `log`
  std::shared_ptr<MemoryLog> log;  // null: nothing is recorded
};

Current& current() {
  static auto* instance = new Current;
  return *instance;
}

}  // namespace

bool beginCounting() {
  std::lock_guard<std::mutex> lock(current().mutex);
  if (current().log || MemoryLog::isTaken()) {
    return false;
  }
  current().log = std::make_shared<MemoryLog>(nullptr);
  current().log->install(current().log);
  return true;
}

void endCounting() {
  std::lock_guard<std::mutex> lock(current().mutex);
  if (current().log && !current().log->isProfile()) {
    current().log->close();  // on another thread the log stays installed, and records nothing
    current().log = nullptr;
  }
}

void beginProfile() {
  endCounting();  // the profile's log counts too
  const auto log =
      std::make_shared<MemoryLog>(std::make_shared<StepTrace>(0, StepTrace::For::Profile));
  std::lock_guard<std::mutex> lock(current().mutex);
  TORCH_CHECK(
      !current().log,
      "ebb: another ebb.profile or ebb.plan is already recording in this process; run one at a "
      "time");
  TORCH_CHECK(
      !MemoryLog::isTaken(),
      "ebb: torch.profiler is active on this thread, and a profile of ebb needs its place; stop "
      "it first");
  current().log = log;
  log->install(log);
  putTraceInPlace(log->trace);
}

Profile endProfile() {
  std::unique_lock<std::mutex> lock(current().mutex);
  const std::shared_ptr<MemoryLog> log = current().log;
  TORCH_CHECK(log && log->isProfile(), "ebb: no profile has begun");
  putTraceInPlace(nullptr);
  TORCH_CHECK(
      log->close(),
      "ebb: a profile must end on the thread on which it began; nothing more is recorded");
  current().log = nullptr;
  lock.unlock();  // the next line waits for devices
  Profile found = log->trace->profile();
  found.allocations = log->take();
  return found;
}

}  // namespace ebb
