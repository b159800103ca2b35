// Memory is the host's. It is never given back to the system, so that who comes too late finds
// poison (0xFF: NaN) or another's bytes, and no crash.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "streams.h"

namespace late {

// Free memory by the stream that it was allocated on (-1: pinned memory of the host), and size.
inline std::map<std::pair<int, size_t>, std::vector<void*>> spare;
inline std::map<void*, std::pair<int, size_t>> blocks;

inline void* takeBlock(int stream, size_t nbytes) {
  std::lock_guard lock(mutex);
  const std::pair key{stream, (nbytes + 63) / 64 * 64};
  auto& list = spare[key];
  if (!list.empty()) {
    void* memory = list.back();
    list.pop_back();
    return memory;
  }
  void* memory = std::aligned_alloc(64, key.second);
  std::memset(memory, 0xFF, key.second);
  blocks[memory] = key;
  return memory;
}

inline void giveBlock(void* memory) {
  std::lock_guard lock(mutex);
  if (memory != nullptr) {
    const auto [stream, nbytes] = blocks.at(memory);
    const auto poison = [memory, nbytes = nbytes] { std::memset(memory, 0xFF, nbytes); };
    stream < 0 ? poison() : static_cast<void>(enqueue(stream, poison));
    spare[{stream, nbytes}].push_back(memory);
  }
}

inline bool isPinned(const void* pointer) {
  std::lock_guard lock(mutex);
  const auto found = blocks.find(const_cast<void*>(pointer));
  return found != blocks.end() && found->second.first < 0;
}

struct DeviceMemory final : c10::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    void* memory = nbytes == 0 ? nullptr : takeBlock(currentStream, nbytes);
    return {memory, memory, &giveBlock, kDevice};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &giveBlock;
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    finish(currentStream);
    std::memcpy(to, from, nbytes);
  }
};
inline DeviceMemory deviceMemory;

struct PinnedMemory final : c10::Allocator {
  at::DataPtr allocate(size_t nbytes) override {
    void* memory = nbytes == 0 ? nullptr : takeBlock(-1, nbytes);
    return {memory, memory, &giveBlock, c10::Device(c10::kCPU)};
  }
  at::DeleterFnPtr raw_deleter() const override {
    return &giveBlock;
  }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
};
inline PinnedMemory pinnedMemory;

}  // namespace late
