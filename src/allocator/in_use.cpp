#include "allocator/in_use.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "allocator/shortage.h"

namespace ebb {
namespace {

size_t residentBytes() {
  static const int file = ::open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  std::array<char, 128> text{};
  if (file < 0 || ::pread(file, text.data(), text.size() - 1, 0) <= 0) {
    return 0;
  }
  size_t size = 0;
  size_t resident = 0;
  if (std::sscanf(text.data(), "%zu %zu", &size, &resident) != 2) {
    return 0;
  }
  return resident * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

// Returns the caching allocator of a type of device; null if there is none, or if the program has
// not used the allocator yet.
c10::DeviceAllocator* allocatorOf(c10::DeviceType type) {
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(type));
  return allocator != nullptr && allocator->initialized() ? allocator : nullptr;
}

void raise(std::atomic<size_t>& most, size_t value) {
  size_t before = most.load(std::memory_order_relaxed);
  while (value > before && !most.compare_exchange_weak(before, value, std::memory_order_relaxed)) {
  }
}

// The allocator's statistics. Empty if the program has not used the device, or if its allocator
// (CUDAPluggableAllocator) has no statistics and raises.
std::optional<c10::CachingDeviceAllocator::DeviceStats> statisticsOf(c10::Device device) {
  auto* allocator = allocatorOf(device.type());
  if (allocator == nullptr) {
    return std::nullopt;
  }
  try {
    return allocator->getDeviceStats(device.index());
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

// Note [Tensors in host memory are counted]
// torch counts the bytes of accelerators. For the CPU, torch counts only while a profiler listens,
// at the cost of a lock and a table entry for each tensor. This allocator calls torch's CPU
// allocator and its deleter, and counts bytes around both calls. A deleter gets no size, so ebb
// asks malloc_usable_size() for the size. For a large block, malloc_usable_size() rounds up to
// whole pages, so a table holds the exact sizes of large blocks. Allocating a large block takes so
// long that the table's lock does not matter.
class CountingAllocator final : public c10::Allocator {
 public:
  static CountingAllocator& get() {
    static auto* instance = [] {
      auto* made = new CountingAllocator;
      c10::SetCPUAllocator(made, 1);
      return made;
    }();
    return *instance;
  }

  c10::DataPtr allocate(size_t nbytes) override {
    c10::DataPtr data = take(nbytes);
    if (data.get() != nullptr && data.compare_exchange_deleter(free_, &release)) {
      if (nbytes >= kLarge) {
        std::lock_guard<std::mutex> lock(mutex_);
        large_[data.get()] = nbytes;
      } else {
        nbytes = ::malloc_usable_size(data.get());
      }
      raise(most_, now_.fetch_add(nbytes, std::memory_order_relaxed) + nbytes);
    }
    return data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    torchs_.copy_data(to, from, nbytes);
  }

  TensorBytes bytes() const { return {now_.load(), most_.load(), true}; }
  void reset() { most_.store(now_.load()); }

 private:
  static constexpr size_t kLarge = 64 * 1024;

  // See Note [Memory given back]
  c10::DataPtr take(size_t nbytes) {
    for (;;) {
      try {
        const auto fails = failsHostAllocation.load(std::memory_order_relaxed);
        TORCH_CHECK(
            fails == nullptr || !fails(nbytes),
            "DefaultCPUAllocator: can't allocate memory: fault injected");
        return torchs_.allocate(nbytes);
      } catch (const c10::Error&) {
        if (!giveBackMemory(c10::kCPU)) {
          throw;
        }
      }
    }
  }

  static void release(void* data) {
    if (data != nullptr) {
      CountingAllocator& own = get();
      own.now_.fetch_sub(own.forget(data), std::memory_order_relaxed);
      own.free_(data);
    }
  }

  // Returns the bytes that were counted for `data`.
  size_t forget(void* data) {
    const size_t usable = ::malloc_usable_size(data);
    if (usable < kLarge) {
      return usable;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = large_.extract(data);
    return found.empty() ? usable : found.mapped();
  }

  c10::Allocator& torchs_ = *c10::GetCPUAllocator();
  const c10::DeleterFnPtr free_ = torchs_.raw_deleter();
  std::atomic<size_t> now_{0};
  std::atomic<size_t> most_{0};
  std::mutex mutex_;  // guards all members below
  std::unordered_map<void*, size_t> large_;
};

// See Note [Peaks on an accelerator].
struct Counting {
  std::atomic<size_t> peakBefore{0};  // the allocator's, when counting began
  std::atomic<size_t> noted{0};       // the most that logs have seen since then
  std::atomic<int> logs{0};
} counting;

// Bytes since the count began.
TensorBytes counted(c10::Device device) {
  if (device.is_cpu()) {
    return CountingAllocator::get().bytes();
  }
  const auto stats = statisticsOf(device);
  if (!stats) {
    return {0, 0, true};
  }
  const auto& bytes = stats->allocated_bytes[kAll];
  const auto now = static_cast<size_t>(bytes.current);
  const auto peak = static_cast<size_t>(bytes.peak);
  if (peak == counting.peakBefore && counting.logs > 0) {
    return {now, std::max(now, counting.noted.load()), true};
  }
  return {now, peak, peak != counting.peakBefore};
}

void countAnew(c10::Device device) {
  if (device.is_cpu()) {
    CountingAllocator::get().reset();
  } else if (const auto stats = statisticsOf(device)) {
    const auto& bytes = stats->allocated_bytes[kAll];
    counting.peakBefore = static_cast<size_t>(bytes.peak);
    counting.noted = static_cast<size_t>(bytes.current);
  }
}

struct Windows {
  std::mutex mutex;              // guards `all` and each window
  std::vector<PeakWindow*> all;  // that exist
};

Windows& windows() {
  static auto* instance = new Windows;
  return *instance;
}

PeakWindow& windowOfBudget() {
  static auto* instance = new PeakWindow;
  return *instance;
}

}  // namespace

std::atomic<size_t> insteadOfBytesInUse{0};
std::atomic<bool (*)(size_t nbytes)> failsHostAllocation{nullptr};

c10::Device deviceInUse() {
  const auto accelerator = at::getAccelerator(false);
  return accelerator && allocatorOf(*accelerator) != nullptr
             ? c10::Device(*accelerator, at::accelerator::getDeviceIndex())
             : c10::Device(c10::kCPU);
}

size_t bytesInUse(c10::Device device) {
  if (const size_t nbytes = insteadOfBytesInUse.load()) {
    return nbytes;
  }
  if (device.is_cpu()) {
    return residentBytes();
  }
  const auto stats = statisticsOf(device);
  return stats ? static_cast<size_t>(std::max(
                     stats->allocated_bytes[kAll].current, stats->active_bytes[kAll].current))
               : 0;
}

std::optional<CacheBytes> cacheBytes(c10::Device device) {
  const auto stats = statisticsOf(device);
  if (!stats) {
    return std::nullopt;
  }
  const auto bytes = [](const c10::CachingAllocator::StatArray& of) {
    return static_cast<size_t>(of[kAll].current);
  };
  const size_t taken = bytes(stats->reserved_bytes);
  const size_t used = bytes(stats->active_bytes) + bytes(stats->inactive_split_bytes);
  return CacheBytes{taken, taken - std::min(taken, used)};
}

void useCountingAllocator() { CountingAllocator::get(); }

PeakWindow::PeakWindow() {
  std::lock_guard<std::mutex> lock(windows().mutex);
  windows().all.push_back(this);
}

PeakWindow::~PeakWindow() {
  std::lock_guard<std::mutex> lock(windows().mutex);
  std::erase(windows().all, this);
}

void PeakWindow::begin(c10::Device device) {
  std::lock_guard<std::mutex> lock(windows().mutex);
  const TensorBytes part = counted(device);
  for (PeakWindow* window : windows().all) {
    if (window->device_ == device) {
      window->add(part);
    }
  }
  device_ = device;
  exact_ = most_ = 0;
  countAnew(device);
}

TensorBytes PeakWindow::read(c10::Device device) const {
  std::lock_guard<std::mutex> lock(windows().mutex);
  const TensorBytes part = counted(device);
  if (device != device_) {
    return part;
  }
  const size_t most = std::max(most_, part.most);
  return {part.now, most, std::max(exact_, part.isExact ? part.most : 0) == most};
}

void PeakWindow::add(const TensorBytes& part) {
  most_ = std::max(most_, part.most);
  if (part.isExact) {
    exact_ = std::max(exact_, part.most);
  }
}

TensorBytes tensorBytes(c10::Device device) { return windowOfBudget().read(device); }

void resetMostTensorBytes(c10::Device device) { windowOfBudget().begin(device); }

void beginNotingAllocations() { ++counting.logs; }

void endNotingAllocations() { --counting.logs; }

void noteAllocated(size_t total) { raise(counting.noted, total); }

}  // namespace ebb
