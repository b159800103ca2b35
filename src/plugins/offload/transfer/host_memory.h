// Pools of host memory for offloading: one for each device, and memory of captured graphs.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "plugins/offload/transfer/transfer.h"

namespace ebb {

// The next writer of memory from a pool: the device's outgoing stream, or the host. The host waits
// for the last copy of memory that it takes.
enum class HostUser : uint8_t { OutStream, Host };

// Host memory that devices copy to and from asynchronously. The pool keeps freed memory, since
// allocation is expensive. Not thread-safe: the engine's lock guards the pool.
class HostPool {
 public:
  explicit HostPool(Transfer& via) : via_(via) {}

  // At least `nbytes`, and at most a quarter more; see Note [Classes of sizes]. Null if the limit
  // does not allow the size or the system has no memory. With `anyway` the limit does not apply.
  c10::Storage take(size_t nbytes, c10::Device device, HostUser user, bool anyway = false);

  // As take(), but only from free memory; null if nothing fits.
  c10::Storage takeFree(size_t nbytes, HostUser user);

  // Returns memory from take(). `lastCopy` is the end of the last copy from or to the memory, which
  // the outgoing stream runs after; null if no copy uses the memory.
  void give(c10::Storage memory, TransferEventPtr lastCopy);

  // Limits the allocated bytes; the pool frees unused memory beyond the limit. With `retain` the
  // pool frees nothing, and keeps unused memory for reuse.
  void setLimit(size_t bytes, bool retain);

  // Frees all unused memory, even with `retain`.
  void trim();

  size_t held() const { return held_; }
  size_t used() const { return used_; }

 private:
  struct Free {
    c10::Storage memory;
    TransferEventPtr lastCopy;  // see give()
  };

  static size_t classOf(size_t nbytes);
  c10::Storage takeNew(size_t nbytes, c10::Device device, bool anyway);
  c10::Storage allocate(size_t nbytes, c10::Device device);
  void freeUntil(size_t bytes);

  Transfer& via_;                     // allocates the memory
  std::multimap<size_t, Free> free_;  // unused memory by size; of equal sizes, earliest first
  bool retain_ = false;
  size_t limit_ = 0;  // bytes
  size_t held_ = 0;   // bytes, in use or not
  size_t used_ = 0;   // bytes in use
};

// Note [Whose host memory it is]
// A device's next copy may use freed host memory if the device's outgoing stream is ordered after
// the memory's last copy; the host need not know that this copy is done. Only before the host
// itself writes to the memory or frees it, the host waits for that copy. Each device has its own
// pool, because streams of different devices are not ordered with each other. Host memory of a
// captured CUDA graph belongs to the graph for ever. Each launch of the graph writes to the same
// addresses, whatever else is stored there, and a launch cannot wait for a copy that an eager step
// started. Later copies of the same capture may use the graph's host memory again. Memory of graphs
// counts as used for ever.
//
// HostMemory is not thread-safe: the engine's lock guards it.
class HostMemory {
 public:
  explicit HostMemory(Transfer& via) : via_(via) {}

  // As HostPool::take, with one limit for all devices.
  c10::Storage take(size_t nbytes, c10::Device device, HostUser user, bool anyway = false);
  void give(c10::Storage memory, c10::Device device, TransferEventPtr lastCopy) {
    poolOf(device).give(std::move(memory), std::move(lastCopy));
  }
  void setLimit(size_t bytes, bool retain);
  void trim();
  size_t held() const;
  size_t used() const;

  // Memory for the current capture: memory that this capture has freed, or else free memory of the
  // pool. Null if nothing fits.
  c10::Storage takeForCapture(size_t nbytes, c10::Device device);
  void giveToCapture(c10::Storage memory, c10::Device device) {
    const std::pair size(device.index(), memory.nbytes());
    ofCapture_.emplace_hint(ofCapture_.lower_bound(size), size, std::move(memory));
  }
  void captureIsOver();

  // Keeps memory whose address a graph has recorded, after the end of the capture.
  void giveToGraph(c10::Storage memory) { ofGraphs_.push_back(std::move(memory)); }

  // True if the limit allows `nbytes` more.
  bool hasRoomFor(size_t nbytes) const { return held() <= limit_ && nbytes <= limit_ - held(); }

 private:
  HostPool& poolOf(c10::Device device) {
    return pools_.try_emplace(device.index(), via_).first->second;
  }

  using BySize = std::multimap<std::pair<c10::DeviceIndex, size_t>, c10::Storage>;

  Transfer& via_;                               // allocates the memory
  std::map<c10::DeviceIndex, HostPool> pools_;  // memory used outside of captures
  BySize ofCapture_;                            // free memory of the current capture
  std::vector<c10::Storage> ofGraphs_;
  size_t limit_ = 0;  // bytes
  bool retain_ = false;
};

}  // namespace ebb
