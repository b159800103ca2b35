#include "transfer/host_pool.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "transfer/transfer.h"

namespace ebb {

c10::Storage HostPool::allocate(size_t nbytes, c10::Device device) {
  try {
    return via_.allocateOnHost(nbytes, device);
  } catch (const c10::Error&) {
    return {};
  }
}

c10::Storage HostPool::takeFree(size_t nbytes) {
  const auto fitting = free_.lower_bound(nbytes);
  if (fitting == free_.end() || fitting->first > nbytes + nbytes / 20) {
    return {};
  }
  c10::Storage memory = std::move(fitting->second.back());
  fitting->second.pop_back();
  if (fitting->second.empty()) {
    free_.erase(fitting);
  }
  used_ += memory.nbytes();
  return memory;
}

c10::Storage HostPool::take(size_t nbytes, c10::Device device, bool anyway) {
  c10::Storage memory = takeFree(nbytes);
  if (!memory) {
    freeUntil(limit_ - std::min(nbytes, limit_));
    if (!anyway && (nbytes > limit_ || held_ > limit_ - nbytes)) {
      return {};
    }
    memory = allocate(nbytes, device);
    if (!memory) {
      freeUntil(0);
      memory = allocate(nbytes, device);
    }
    if (!memory) {
      return {};  // the caller falls back, and says so
    }
    held_ += memory.nbytes();
    used_ += memory.nbytes();
  }
  return memory;
}

void HostPool::give(c10::Storage memory) {
  used_ -= memory.nbytes();
  if (!via_.isReusable(memory)) {
    held_ -= memory.nbytes();
    return;
  }
  free_[memory.nbytes()].push_back(std::move(memory));
  if (held_ > limit_) {
    freeUntil(limit_);
  }
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

// Largest first: the fewest that make room.
void HostPool::freeUntil(size_t bytes) {
  if (retain_) {
    return;
  }
  while (held_ > bytes && !free_.empty()) {
    const auto largest = std::prev(free_.end());
    held_ -= largest->first;
    largest->second.pop_back();
    if (largest->second.empty()) {
      free_.erase(largest);
    }
  }
}

}  // namespace ebb
