#include "plugins/offload/transfer/host_memory.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

namespace ebb {
namespace {

// Note [Classes of sizes]
// If a tensor has another size in each step, no free memory has exactly that size. At the limit,
// each step would then free and allocate memory, and registering pinned memory with the device
// takes seconds for some gigabytes. So if memory must be freed in order to allocate, the new size
// is rounded up to a size class; there are eight classes between a power of two and the next. At
// the limit, free memory up to a quarter larger than the tensor comes before a new allocation. In a
// step with constant sizes, or below the limit, memory exceeds the tensor's size by a twentieth at
// most.
size_t classOf(size_t nbytes) {
  const size_t step = std::max<size_t>(std::bit_floor(nbytes) / 8, 1);
  return (nbytes + step - 1) / step * step;
}

}  // namespace

c10::Storage HostMemory::take(size_t nbytes, c10::Device device, HostUser user, bool anyway) {
  freeUntil(limit_, device);
  c10::Storage memory = takeFree(nbytes, device, user);
  if (!memory) {
    memory = takeNew(nbytes, device, anyway);
    used_ += memory ? memory.nbytes() : 0;
  }
  return memory;
}

// Null if nothing fits.
c10::Storage HostMemory::takeFree(size_t nbytes, c10::Device device, HostUser user) {
  const bool isFull = held_ + nbytes > limit_;
  const auto fitting = free_.lower_bound({device.index(), nbytes});
  const Size most(device.index(), nbytes + nbytes / (isFull ? 4 : 20));
  if (fitting == free_.end() || fitting->first > most) {
    return {};
  }
  if (user == HostUser::Host && fitting->second.lastCopy) {
    fitting->second.lastCopy->wait();
  }
  used_ += fitting->second.memory.nbytes();
  return std::move(free_.extract(fitting).mapped().memory);
}

c10::Storage HostMemory::takeNew(size_t nbytes, c10::Device device, bool anyway) {
  const auto ofDevice = free_.lower_bound({device.index(), 0});
  const bool hasFree = ofDevice != free_.end() && ofDevice->first.first == device.index();
  const bool replaces = hasFree && held_ + nbytes > limit_;
  const size_t wanted = replaces ? classOf(nbytes) : nbytes;
  freeUntil(limit_ - std::min(wanted, limit_), device);
  if (!anyway && !hasRoomFor(nbytes)) {
    return {};
  }
  c10::Storage memory = allocate(hasRoomFor(wanted) ? wanted : nbytes, device);
  if (!memory) {
    freeUntil(0, device);
    memory = allocate(nbytes, device);
  }
  held_ += memory ? memory.nbytes() : 0;
  return memory;  // null: the caller falls back, and reports the refusal
}

c10::Storage HostMemory::allocate(size_t nbytes, c10::Device device) {
  try {
    return via_.allocateOnHost(nbytes, device);
  } catch (const c10::Error&) {
    return {};
  }
}

void HostMemory::give(c10::Storage memory, c10::Device device, TransferEventPtr lastCopy) {
  const size_t nbytes = memory.nbytes();
  used_ -= nbytes;
  if (via_.isDisk()) {  // not kept for reuse: configure() may open another file
    held_ -= nbytes;
    return;
  }
  free_.emplace(Size(device.index(), nbytes), Free{std::move(memory), std::move(lastCopy)});
}

void HostMemory::trim() { freeUntil(0, c10::kCPU); }

// Frees unused memory of `first`, and then of other devices, until `bytes` are held. Frees the
// largest blocks first, so that the fewest are freed. The host waits for their last copies.
void HostMemory::freeUntil(size_t bytes, c10::Device first) {
  while (held_ > bytes && !free_.empty()) {
    const auto after = free_.upper_bound({first.index(), SIZE_MAX});
    const bool isOfFirst = after != free_.begin() && std::prev(after)->first.first == first.index();
    const auto largest = std::prev(isOfFirst ? after : free_.end());
    if (largest->second.lastCopy) {
      largest->second.lastCopy->wait();
    }
    held_ -= largest->second.memory.nbytes();
    free_.erase(largest);
  }
}

c10::Storage HostMemory::takeForCapture(size_t nbytes, c10::Device device) {
  const auto fitting = ofCapture_.lower_bound({device.index(), nbytes});
  const Size most(device.index(), nbytes + nbytes / 20);
  if (fitting == ofCapture_.end() || fitting->first > most) {
    return takeFree(nbytes, device, HostUser::OutStream);
  }
  return std::move(ofCapture_.extract(fitting).mapped());
}

void HostMemory::captureIsOver() {
  for (auto& [size, free] : std::exchange(ofCapture_, {})) {
    ofGraphs_.push_back(std::move(free));
  }
}

}  // namespace ebb
