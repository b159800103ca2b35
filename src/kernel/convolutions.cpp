#include "kernel/convolutions.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <atomic>
#include <cstdint>

#include "support/per_thread.h"

namespace ebb {
namespace {

std::atomic<bool> hasFailed{false};
std::atomic<uint32_t> forgotten{0};  // calls of forgetFailedWorkspaces()

// For a thread on which an allocation failed during the replay of a convolution: the value of
// `forgotten` at that time, plus 1.
PerThread<uint32_t>& failures() {
  static auto* instance = new PerThread<uint32_t>;
  return *instance;
}

bool areTimed() {
  const at::Context& context = at::globalContext();
  return context.benchmarkCuDNN() && context.userEnabledCuDNN();
}

}  // namespace

const char* convolutionsAreKept() {
  if (areTimed()) {
    return "cuDNN picks the algorithm by timing (torch.backends.cudnn.benchmark), so a replay may "
           "give other bits; a rule with force=True recomputes it anyway";
  }
  if (hasFailed.load(std::memory_order_relaxed)) {
    return "a convolution's workspace could not be allocated, so a replay may use another "
           "algorithm; a rule with force=True recomputes it anyway";
  }
  return nullptr;
}

WorkspaceWatch::WorkspaceWatch(c10::Device device) : device_(device), before_(count()) {
}

bool WorkspaceWatch::sawFailure() const {
  if (count() == before_) {
    return false;
  }
  hasFailed.store(true, std::memory_order_relaxed);
  return true;
}

// Returns the number of failed allocations on the device so far; 0 if the number is unknown.
// getDeviceStats() raises if a user's allocator has no statistics.
int64_t WorkspaceWatch::count() const {
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device_.type()));
  if (allocator == nullptr || !allocator->initialized()) {
    return 0;
  }
  try {
    return allocator->getDeviceStats(device_.index()).num_ooms;
  } catch (const c10::Error&) {
    return 0;
  }
}

bool choosesOtherwise() {
  return hasFailed.load(std::memory_order_relaxed) && failures().get() == forgotten + 1;
}

void chooseOtherwise() {
  failures().exchange(forgotten + 1);
}

void forgetFailedWorkspaces() {
  hasFailed.store(false);
  ++forgotten;
}

}  // namespace ebb
