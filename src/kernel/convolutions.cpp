#include "kernel/convolutions.h"

#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace ebb {
namespace {

std::atomic<bool> hasFailed{false};

// Threads on which an allocation failed during the replay of a convolution. There are few such
// threads, so a list replaces a thread_local: see Note [Static TLS].
struct Threads {
  std::mutex mutex;  // guards all members below
  std::vector<std::thread::id> all;

  static Threads& get() {
    static auto* instance = new Threads;
    return *instance;
  }
};

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
  if (!hasFailed.load(std::memory_order_relaxed)) {
    return false;
  }
  Threads& threads = Threads::get();
  std::lock_guard<std::mutex> lock(threads.mutex);
  const auto id = std::this_thread::get_id();
  return std::find(threads.all.begin(), threads.all.end(), id) != threads.all.end();
}

void chooseOtherwise() {
  Threads& threads = Threads::get();
  std::lock_guard<std::mutex> lock(threads.mutex);
  threads.all.push_back(std::this_thread::get_id());
}

void forgetFailedWorkspaces() {
  Threads& threads = Threads::get();
  std::lock_guard<std::mutex> lock(threads.mutex);
  hasFailed.store(false);
  threads.all.clear();
}

}  // namespace ebb
