#include "report/memory_log.h"

#include <c10/util/Exception.h>

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
  c10::ThreadLocalDebugInfo::_push(kKind, std::move(self));
}

void MemoryLog::remove() {
  TORCH_CHECK(
      c10::ThreadLocalDebugInfo::get(kKind) == this,
      "ebb: the profile began on another thread, and ends there");
  c10::ThreadLocalDebugInfo::_pop(kKind);
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
  const double time = now_();
  std::lock_guard<std::mutex> lock(mutex_);
  events_.push_back({time, reinterpret_cast<uintptr_t>(address), bytes});
}

}  // namespace ebb
