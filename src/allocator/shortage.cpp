#include "allocator/shortage.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/util/Registry.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>

#include "allocator/in_use.h"
#include "memory/cuda_runtime.h"

// The interface of torch's CUDA allocator, whose header needs CUDA's.
namespace c10 {
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};
}  // namespace c10

namespace ebb {
namespace {

std::array<std::atomic<GiveBack>, 2> reserves{};
std::atomic<bool> isStopped{false};

// The memory that a device's allocator has taken from the device, seen at its calls of ebb.
struct Allocator {
  std::optional<size_t> taken{};  // bytes at the last call; empty before the first call
  size_t largest = 0;             // most bytes taken between two calls: a segment
  size_t allowed = SIZE_MAX;      // bytes that the allocator may take
};

struct Allocators {
  std::mutex mutex;  // guards `of`
  std::unordered_map<c10::Device, Allocator> of;
};

Allocators& allocators() {
  static auto* instance = new Allocators;
  return *instance;
}

// Called when the allocator needs memory and has taken `taken` bytes so far.
Allocator update(c10::Device device, size_t taken) {
  std::lock_guard<std::mutex> lock(allocators().mutex);
  Allocator& known = allocators().of[device];
  const size_t before = std::min(taken, known.taken.value_or(taken));
  known.largest = std::max(known.largest, taken - before);
  known.taken = taken;
  return known;
}

bool isShort(c10::Device device) {
  const auto cache = cacheBytes(device);
  if (!cache) {
    return false;
  }
  const Allocator known = update(device, cache->taken);
  const bool hasReserve = std::any_of(
      reserves.begin(), reserves.end(), [](const auto& each) { return each.load() != nullptr; });
  if (!hasReserve) {
    return false;
  }
  constexpr size_t kSmallest = size_t{20} << 20;  // a piece for small tensors
  const RelaxedCaptures relaxed;
  const auto [untaken, size] =
      c10::getDeviceAllocator(device.type())->getMemoryInfo(device.index());
  const size_t free = std::min(untaken, known.allowed - std::min(known.allowed, cache->taken));
  const size_t total = std::min(size, known.allowed);
  const size_t largest = std::min(known.largest, total / 4);
  return free + cache->returnable < std::max({largest, kSmallest, total / 20});
}

class GivesBack final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override { return giveBackIfNeeded(); }
};

}  // namespace

void setReserve(Reserve reserve, GiveBack giveBack) {
  listenToCudaAllocator();
  reserves[static_cast<size_t>(reserve)].store(giveBack);
}

bool giveBackMemory(c10::Device device) {
  bool hasGiven = false;
  for (const auto& reserve : reserves) {
    try {
      const GiveBack giveBack = reserve.load();
      hasGiven |= giveBack != nullptr && giveBack(device);
    } catch (const std::exception&) {  // the device has failed: its next call raises
    }
  }
  return hasGiven;
}

bool giveBackIfNeeded() {
  if (isStopped.load() || c10::impl::GPUTrace::haveState) {
    return false;
  }
  try {
    const c10::Device device = deviceInUse();
    return !device.is_cpu() && isShort(device) && giveBackMemory(device);
  } catch (const std::exception&) {
    return false;
  }
}

void stopGivingBack() { isStopped.store(true); }

void listenToCudaAllocator() {
  using Registry = c10::Registry<std::string, std::unique_ptr<c10::FreeMemoryCallback>>;
  static const auto registry = loadedFunction<Registry* (*)()>(
      "libc10_cuda", "_ZN3c1031FreeCudaMemoryCallbacksRegistryB5cxx11Ev");
  static std::once_flag once;
  std::call_once(once, [] {
    if (registry != nullptr) {
      registry()->Register("ebb", [] { return std::make_unique<GivesBack>(); });
    }
  });
}

void allowAllocator(size_t nbytes, c10::Device device) {
  std::lock_guard<std::mutex> lock(allocators().mutex);
  allocators().of[device] = Allocator{.allowed = nbytes};
}

bool mayBeGivenBack(const c10::Storage& storage, c10::Device device) {
  if (!storage || storage.device() != device) {
    return false;
  }
  const c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
  return impl.pyobj_slot()->load_pyobj() == nullptr &&
         impl.data_ptr().get_deleter() == c10::GetAllocator(device.type())->raw_deleter();
}

}  // namespace ebb
