// Host memory by whom it may be used again.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

#include "transfer/host_pool.h"

namespace ebb {

// Note [Whose host memory it is]
// Memory that was copied to is free for a device's next copy when the stream on which bytes leave
// that device comes after the last one, which the host need not know. So each device has a pool of
// its own: nothing orders another's stream.
// What a graph was captured with is its own for good: each replay writes there again, whatever
// anybody else keeps in it, and a copy that was in an eager step before a replay could not be
// waited for by it. Inside of its capture it is used again. It counts as used for ever.
//
// Not thread-safe: the engine's lock guards it.
class HostMemory {
 public:
  explicit HostMemory(Transfer& via) : via_(via) {
  }

  // As a pool's. The limit is one for all devices.
  c10::Storage take(size_t nbytes, c10::Device device, bool anyway = false);
  void give(c10::Storage memory, c10::Device device) {
    poolOf(device).give(std::move(memory));
  }
  void setLimit(size_t bytes, bool retain);
  void trim();
  size_t held() const;
  size_t used() const;

  // For the capture that goes on: what it has given back, or what is free. Null if none fits.
  c10::Storage takeForCapture(size_t nbytes, c10::Device device);
  void giveToCapture(c10::Storage memory, c10::Device device) {
    ofCapture_[{device.index(), memory.nbytes()}].push_back(std::move(memory));
  }
  void captureIsOver();

  // A graph has its address, and its capture is over.
  void giveToGraph(c10::Storage memory) {
    ofGraphs_.push_back(std::move(memory));
  }

  // Whether the limit allows so many bytes more.
  bool hasRoomFor(size_t nbytes) const {
    return held() <= limit_ && nbytes <= limit_ - held();
  }

 private:
  HostPool& poolOf(c10::Device device) {
    return pools_.try_emplace(device.index(), via_).first->second;
  }

  using BySize = std::map<std::pair<c10::DeviceIndex, size_t>, std::vector<c10::Storage>>;

  Transfer& via_;                               // whose memory it is
  std::map<c10::DeviceIndex, HostPool> pools_;  // of what runs outside of captures
  BySize ofCapture_;                            // free
  std::vector<c10::Storage> ofGraphs_;
  size_t limit_ = 0;  // bytes
  bool retain_ = false;
};

}  // namespace ebb
