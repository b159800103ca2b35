#include "plugins/offload/transfer/host_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace ebb {

c10::Storage HostPool::allocate(size_t nbytes, c10::Device device) {
  try {
    return via_.allocateOnHost(nbytes, device);
  } catch (const c10::Error&) {
    return {};
  }
}

// Note [Classes of sizes]
// If a tensor has another size in each step, the pool has no free memory of exactly that size. At
// the limit, each step would then free and allocate memory, and registering pinned memory with the
// device takes seconds for some gigabytes. So if the pool must free memory in order to allocate, it
// rounds the new size up to a size class; there are eight classes between a power of two and the
// next. At the limit, the pool prefers free memory up to a quarter larger than the tensor over a
// new allocation. In a step with constant sizes, or below the limit, memory exceeds the tensor's
// size by a twentieth at most.
size_t HostPool::classOf(size_t nbytes) {
  const size_t step = std::max<size_t>(std::bit_floor(nbytes) / 8, 1);
  return (nbytes + step - 1) / step * step;
}

c10::Storage HostPool::takeNew(size_t nbytes, c10::Device device, bool anyway) {
  const bool replaces = !retain_ && !free_.empty() && held_ + nbytes > limit_;
  const size_t wanted = replaces ? classOf(nbytes) : nbytes;
  freeUntil(limit_ - std::min(wanted, limit_));
  if (!anyway && (nbytes > limit_ || held_ > limit_ - nbytes)) {
    return {};
  }
  c10::Storage memory = allocate(held_ + wanted <= limit_ ? wanted : nbytes, device);
  if (!memory) {
    freeUntil(0);
    memory = allocate(nbytes, device);
  }
  held_ += memory ? memory.nbytes() : 0;
  return memory;  // null: the caller falls back, and reports the refusal
}

c10::Storage HostPool::takeFree(size_t nbytes, HostUser user) {
  const bool isFull = held_ + nbytes > limit_;
  const auto fitting = free_.lower_bound(nbytes);
  if (fitting == free_.end() || fitting->first > nbytes + nbytes / (isFull ? 4 : 20)) {
    return {};
  }
  if (user == HostUser::Host && fitting->second.lastCopy) {
    fitting->second.lastCopy->wait();
  }
  used_ += fitting->first;
  return std::move(free_.extract(fitting).mapped().memory);
}

c10::Storage HostPool::take(size_t nbytes, c10::Device device, HostUser user, bool anyway) {
  c10::Storage memory = takeFree(nbytes, user);
  if (!memory) {
    memory = takeNew(nbytes, device, anyway);
    used_ += memory ? memory.nbytes() : 0;
  }
  return memory;
}

void HostPool::give(c10::Storage memory, TransferEventPtr lastCopy) {
  used_ -= memory.nbytes();
  if (via_.isDisk()) {  // not kept for reuse: configure() may open another file
    held_ -= memory.nbytes();
    return;
  }
  const size_t nbytes = memory.nbytes();
  free_.emplace(nbytes, Free{std::move(memory), std::move(lastCopy)});
}

void HostPool::setLimit(size_t bytes, bool retain) {
  limit_ = bytes;
  retain_ = retain;
  freeUntil(limit_);
}

void HostPool::trim() {
  const bool retain = std::exchange(retain_, false);
  freeUntil(0);
  retain_ = retain;
}

// Frees the largest blocks first, so that the fewest are freed. The host waits for their last
// copies.
void HostPool::freeUntil(size_t bytes) {
  if (retain_) {
    return;
  }
  while (held_ > bytes && !free_.empty()) {
    const auto largest = std::prev(free_.end());
    if (largest->second.lastCopy) {
      largest->second.lastCopy->wait();
    }
    held_ -= largest->first;
    free_.erase(largest);
  }
}

c10::Storage HostMemory::take(size_t nbytes, c10::Device device, HostUser user, bool anyway) {
  HostPool& pool = poolOf(device);
  const auto takeFromIt = [&] {
    const size_t others = held() - pool.held();
    pool.setLimit(limit_ - std::min(others, limit_), retain_);
    return pool.take(nbytes, device, user, anyway);
  };
  c10::Storage memory = takeFromIt();
  if (!memory && !retain_ && held() > pool.held()) {
    for (auto& [index, other] : pools_) {
      if (&other != &pool) {
        other.trim();
      }
    }
    memory = takeFromIt();
  }
  return memory;
}

c10::Storage HostMemory::takeForCapture(size_t nbytes, c10::Device device) {
  const auto fitting = ofCapture_.lower_bound({device.index(), nbytes});
  const std::pair most(device.index(), nbytes + nbytes / 20);
  if (fitting == ofCapture_.end() || fitting->first > most) {
    return poolOf(device).takeFree(nbytes, HostUser::OutStream);
  }
  return std::move(ofCapture_.extract(fitting).mapped());
}

void HostMemory::captureIsOver() {
  for (auto& [size, free] : std::exchange(ofCapture_, {})) {
    ofGraphs_.push_back(std::move(free));
  }
}

void HostMemory::setLimit(size_t bytes, bool retain) {
  limit_ = bytes;
  retain_ = retain;
}

void HostMemory::trim() {
  for (auto& [index, pool] : pools_) {
    pool.trim();
  }
}

size_t HostMemory::held() const {
  return std::accumulate(pools_.begin(), pools_.end(), size_t{0}, [](size_t sum, const auto& one) {
    return sum + one.second.held();
  });
}

size_t HostMemory::used() const {
  return std::accumulate(pools_.begin(), pools_.end(), size_t{0}, [](size_t sum, const auto& one) {
    return sum + one.second.used();
  });
}

}  // namespace ebb
