#include "transfer/host_memory.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace ebb {

c10::Storage HostMemory::take(size_t nbytes, c10::Device device, bool anyway) {
  HostPool& pool = poolOf(device);
  const auto takeFromIt = [&] {
    const size_t others = held() - pool.held();
    pool.setLimit(limit_ - std::min(others, limit_), retain_);
    return pool.take(nbytes, device, anyway);
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
    return poolOf(device).takeFree(nbytes);
  }
  c10::Storage memory = std::move(fitting->second.back());
  fitting->second.pop_back();
  if (fitting->second.empty()) {
    ofCapture_.erase(fitting);
  }
  return memory;
}

void HostMemory::captureIsOver() {
  for (auto& [size, free] : std::exchange(ofCapture_, {})) {
    std::move(free.begin(), free.end(), std::back_inserter(ofGraphs_));
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
