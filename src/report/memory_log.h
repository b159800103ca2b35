// A log of the allocations and frees of a thread, as torch's allocators report them.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "ebb/profile.h"

namespace ebb {

// An installed log records the allocations on its thread, and on the threads that run the thread's
// backward. The log takes the place of torch's profiler, which then records nothing and must not be
// started: the profiler's callbacks would take the log for their own state.
class MemoryLog final : public torch::profiler::impl::ProfilerStateBase {
 public:
  // `now`: milliseconds since a fixed time.
  explicit MemoryLog(std::function<double()> now);

  // True if torch's profiler or another log is installed on this thread.
  static bool isTaken();

  void install(std::shared_ptr<MemoryLog> self);

  // Stops recording. False if the log is installed on another thread, where it stays installed.
  bool close();

  std::vector<ProfileAllocation> take();

  void reportMemoryUsage(
      void* address, int64_t bytes, size_t allocated, size_t reserved, c10::Device device) override;
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }

 private:
  const std::function<double()> now_;
  std::atomic<bool> closed_{false};
  int logLevelBefore_ = 0;  // torch's level, which is higher while a log is installed
  std::mutex mutex_;        // guards all members below
  std::vector<ProfileAllocation> events_;
};

}  // namespace ebb
