#include "report/memory_log.h"

#include <c10/util/Logging.h>

#include <algorithm>
#include <utility>

namespace ebb {
namespace {

const auto kKind = c10::DebugInfoKind::PROFILER_STATE;

}  // namespace

MemoryLog::MemoryLog(std::function<double()> now)
    : ProfilerStateBase(
          torch::profiler::impl::ProfilerConfig(
              torch::profiler::impl::ProfilerState::Disabled, false, true)),
      now_(std::move(now)) {
}

bool MemoryLog::isTaken() {
  return c10::ThreadLocalDebugInfo::get(kKind) != nullptr;
}

void MemoryLog::install(std::shared_ptr<MemoryLog> self) {
  // While a profiler or log is installed, torch's CPU allocator warns if a block that was allocated
  // earlier is freed. A log expects such blocks.
  logLevelBefore_ = FLAGS_caffe2_log_level;
  FLAGS_caffe2_log_level = std::max(logLevelBefore_, static_cast<int>(c10::GLOG_ERROR));
  c10::ThreadLocalDebugInfo::_push(kKind, std::move(self));
}

bool MemoryLog::close() {
  if (!closed_.exchange(true)) {
    FLAGS_caffe2_log_level = logLevelBefore_;
  }
  const bool isHere = c10::ThreadLocalDebugInfo::get(kKind) == this;
  if (isHere) {
    c10::ThreadLocalDebugInfo::_pop(kKind);
  }
  return isHere;
}

std::vector<ProfileAllocation> MemoryLog::take() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(events_, {});
}

void MemoryLog::reportMemoryUsage(
    void* address,
    int64_t bytes,
    size_t /*allocated*/,
    size_t /*reserved*/,
    c10::Device /*device*/) {
  if (closed_.load(std::memory_order_relaxed)) {
    return;
  }
  const double time = now_();
  std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back({time, reinterpret_cast<uintptr_t>(address), bytes});
}

}  // namespace ebb
