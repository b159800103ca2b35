// Memory of the devices, and pinned memory of the host. What is freed is poisoned (0xFF: NaN) in
// the order of the stream that it was allocated on, and handed out again there at once: who comes
// too late finds poison or another's bytes.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "blocks.h"
#include "settings.h"
#include "streams.h"

namespace late {

struct Usage {
  size_t now = 0;
  size_t peak = 0;
  void add(size_t bytes) {
    now += bytes;
    peak = std::max(peak, now);
  }
};
inline Usage deviceUsage[kDevices];
inline Usage hostUsage;

// Free memory by graph (0: none), stream, and size.
inline std::map<std::tuple<uint64_t, int, size_t>, std::vector<uintptr_t>> spare;

// Freed, and not to be used again before other streams have come so far.
struct Quarantined {
  uintptr_t address;
  std::vector<Point> until;
};
inline std::vector<Quarantined> quarantine;

inline void poison(uintptr_t address) {
  const Block& block = blocks.at(address);
  void* memory = reinterpret_cast<void*>(address);
  enqueue(block.stream, "free", {{memory, true}}, [memory, size = block.size] {
    std::memset(seen(memory), 0xFF, size);
  });
}

inline void makeSpare(uintptr_t address) {
  Block& block = blocks.at(address);
  block.isFree = true;
  spare[{block.pool, block.stream, block.size}].push_back(address);
}

inline void endQuarantine() {
  std::erase_if(quarantine, [](const Quarantined& one) {
    for (const Point& point : one.until) {
      if (!queueOf(point.stream).isDone(point.number)) {
        return false;
      }
    }
    for (const Point& point : one.until) {
      join(hostClock, point.clock);
    }
    blocks.at(one.address).isFree = false;
    poison(one.address);
    makeSpare(one.address);
    return true;
  });
}

inline void tellProfiler(void* memory, int64_t bytes, int stream) {
  c10::reportMemoryUsageToProfiler(
      memory, bytes, deviceUsage[stream / kStreamsEach].now, 0, deviceOf(stream));
}

inline void freeOnDevice(void* memory) {
  if (memory == nullptr) {
    return;
  }
  const Lock lock(program);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  Block& block = blocks.at(address);
  deviceUsage[block.stream / kStreamsEach].now -= block.size;
  tellProfiler(memory, -static_cast<int64_t>(block.size), block.stream);
  const bool ofThisCapture = capture && block.pool == capture->graph.id;
  if (block.pool != 0 ? !ofThisCapture : isCaptured(block.stream)) {
    block.isFree = true;  // a graph may use it: never again
  } else if (block.recordedOn.empty()) {
    poison(address);
    makeSpare(address);
  } else {
    Quarantined held{address, {}};
    for (const int stream : std::exchange(block.recordedOn, {})) {
      held.until.push_back(endOf(stream));
    }
    block.isFree = true;
    quarantine.push_back(std::move(held));
  }
}

inline uintptr_t freshBlock(size_t size) {
  Arena& from = arena();
  TORCH_CHECK(from.next + size <= kArena, "late: the arena is full");
  char* memory = from.told + std::exchange(from.next, from.next + size);
  std::memset(seen(memory), 0xFF, size);
  return reinterpret_cast<uintptr_t>(memory);
}

// On the current stream.
inline void* takeOnDevice(size_t nbytes) {
  const Lock lock(program);
  called("allocate");
  if (!capture) {
    endQuarantine();
  }
  const int stream = currentStream();
  const size_t size = (nbytes + 511) / 512 * 512;
  Usage& usage = deviceUsage[stream / kStreamsEach];
  const size_t limit = settings.limit - std::min(settings.limit, settings.others);
  const auto fits = [&] { return size <= limit && usage.now <= limit - size; };
  const uint64_t pool = isCaptured(stream) ? capture->graph.id : 0;
  auto& free = spare[{pool, stream, size}];
  if (settings.whenShort != nullptr && (free.empty() || !fits())) {
    settings.whenShort();
  }
  TORCH_CHECK_WITH(
      OutOfMemoryError, fits(), "late: out of memory: tried to allocate ", nbytes, " bytes");
  usage.add(size);
  uintptr_t address = 0;
  if (free.empty()) {
    address = freshBlock(size);
  } else {
    address = free.back();
    free.pop_back();
  }
  Block& block = blocks[address];
  block.size = size;
  block.stream = stream;
  block.pool = pool;
  block.isFree = false;
  ++block.generation;
  tellProfiler(reinterpret_cast<void*>(address), static_cast<int64_t>(size), stream);
  return reinterpret_cast<void*>(address);
}

struct DeviceMemory final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t nbytes) override {
    void* memory = nbytes == 0 ? nullptr : takeOnDevice(nbytes);
    return {memory, memory, &freeOnDevice, deviceOf(currentStream())};
  }
  at::DeleterFnPtr raw_deleter() const override { return &freeOnDevice; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    enqueue(currentStream(), "copy_data", {{from, false}, {to, true}}, [=] {
      std::memcpy(seen(to), seen(from), nbytes);
    });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { checkNotCapturing("emptying the cache"); }
  // As CUDA's: memory is known by its deleter.
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    if (memory.get_deleter() != &freeOnDevice) {
      return;
    }
    const Lock lock(program);
    auto* found = blockAt(memory.get());
    if (found != nullptr && found->second.stream != indexOf(stream)) {
      found->second.recordedOn.insert(indexOf(stream));
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Lock lock(program);
    TORCH_CHECK(settings.countsBytes, "late: this allocator has no statistics");
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& all = stats.allocated_bytes[0];
    all.current = static_cast<int64_t>(deviceUsage[device].now);
    all.peak = static_cast<int64_t>(deviceUsage[device].peak);
    auto& active = stats.active_bytes[0].current = all.current;
    for (const Quarantined& one : quarantine) {
      const Block& block = blocks.at(one.address);
      active += block.stream / kStreamsEach == device ? static_cast<int64_t>(block.size) : 0;
    }
    auto& reserved = stats.reserved_bytes[0].current = active;
    for (const auto& [key, addresses] : spare) {
      const auto& [pool, stream, size] = key;
      if (stream / kStreamsEach == device) {
        reserved += static_cast<int64_t>(size * addresses.size());
      }
    }
    // Beyond the limit, free memory counts as returned to the device.
    const size_t most = std::min(settings.limit, kArena);
    const auto rest = static_cast<int64_t>(most - std::min(most, settings.others));
    reserved = std::min(reserved, std::max(active, rest));
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto reserved = getDeviceStats(device).reserved_bytes[0].current;
    const size_t total = std::min(settings.limit, kArena);
    return {total - std::min<size_t>(total, settings.others + reserved), total};
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    const Lock lock(program);
    TORCH_CHECK(settings.countsBytes, "late: this allocator has no statistics");
    deviceUsage[device].peak = deviceUsage[device].now;
  }
};
inline DeviceMemory deviceMemory;

// Pinned memory has no stream: it may be used again as soon as it is free, so nobody may use it
// then.
inline std::map<size_t, std::vector<void*>> spareOnHost;

inline void freeOnHost(void* memory) {
  if (memory == nullptr) {
    return;
  }
  const Lock lock(program);
  hostUses(memory, true, "free of pinned memory");
  Block& block = blocks.at(reinterpret_cast<uintptr_t>(memory));
  block.isFree = true;
  hostUsage.now -= block.size;
  std::memset(memory, 0xFF, block.size);
  spareOnHost[block.size].push_back(memory);
}

inline void* takeOnHost(size_t nbytes) {
  const Lock lock(program);
  checkNotCapturing("allocating pinned memory");
  called("allocate pinned");
  const size_t size = (nbytes + 63) / 64 * 64;
  TORCH_CHECK(
      size <= settings.hostLimit && hostUsage.now <= settings.hostLimit - size,
      "late: out of pinned memory");
  hostUsage.add(size);
  auto& free = spareOnHost[size];
  if (free.empty()) {
    free.push_back(std::aligned_alloc(64, size));
    std::memset(free.back(), 0xFF, size);
  }
  void* memory = free.back();
  free.pop_back();
  Block& block = blocks[reinterpret_cast<uintptr_t>(memory)];
  block.size = size;
  block.isFree = false;
  ++block.generation;
  return memory;
}

inline bool isPinned(const void* address) {
  const Lock lock(program);
  const auto* found = blockAt(address);
  return found != nullptr && found->second.stream == kHost;
}

struct PinnedMemory final : c10::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    void* memory = nbytes == 0 ? nullptr : takeOnHost(nbytes);
    return {memory, memory, &freeOnHost, c10::Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &freeOnHost; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};
inline PinnedMemory pinnedMemory;

}  // namespace late
