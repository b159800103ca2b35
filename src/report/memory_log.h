// What a thread allocates and frees, as torch's allocators tell it.
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

// Installed on a thread it hears of the allocations there, and of those on the threads to which
// autograd takes that thread's backward. In the place of torch's profiler, which then hears
// nothing, and cannot be started: its callbacks take what is installed for their own.
class MemoryLog final : public torch::profiler::impl::ProfilerStateBase {
 public:
  // `now`: milliseconds since some beginning.
  explicit MemoryLog(std::function<double()> now);

  // Whether torch's profiler, or another log, is installed on this thread.
  static bool isTaken();

  void install(std::shared_ptr<MemoryLog> self);

  // Hears of nothing more. False if it is installed on another thread, and stays there.
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
  int logLevelBefore_ = 0;  // torch's, which is higher while a log is installed
  std::mutex mutex_;        // guards what follows
  std::vector<ProfileAllocation> events_;
};

}  // namespace ebb
