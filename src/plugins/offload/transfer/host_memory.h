// Host memory for offloading: of each device, and of captured graphs.
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

// The next writer of host memory: the device's outgoing stream, or the host. The host waits
// for the last copy of memory that it takes.
enum class HostUser : uint8_t { OutStream, Host };

// Note [Whose host memory it is]
// A device's next copy may use freed host memory if the device's outgoing stream is ordered after
// the memory's last copy; the host need not know that this copy is done. Only before the host
// itself writes to the memory or frees it, the host waits for that copy. Each device has its own
// free memory, because streams of different devices are not ordered with each other. Host memory of
// a captured CUDA graph belongs to the graph for ever. Each launch of the graph writes to the same
// addresses, whatever else is stored there, and a launch cannot wait for a copy that an eager step
// started. Later copies of the same capture may use the graph's host memory again. Memory of graphs
// counts as used for ever.
//
// Host memory that devices copy to and from asynchronously. Freed memory is kept, since allocation
// is expensive. Not thread-safe: the engine's lock guards it.
class HostMemory {
 public:
  explicit HostMemory(Transfer& via) : via_(via) {}

  // At least `nbytes`, and at most a quarter more; see Note [Classes of sizes]. Null if the limit
  // does not allow the size or the system has no memory. With `anyway` the limit does not apply.
  c10::Storage take(size_t nbytes, c10::Device device, HostUser user, bool anyway = false);

  // Returns memory from take(). `lastCopy` is the end of the last copy from or to the memory, which
  // the outgoing stream runs after; null if no copy uses the memory.
  void give(c10::Storage memory, c10::Device device, TransferEventPtr lastCopy);

  // Limits the allocated bytes of all devices: the next take() frees unused memory beyond the
  // limit.
  void setLimit(size_t bytes) { limit_ = bytes; }

  // Frees all unused memory.
  void trim();

  size_t held() const { return held_; }
  size_t used() const { return used_; }

  // True if the limit allows `nbytes` more.
  bool hasRoomFor(size_t nbytes) const { return held_ <= limit_ && nbytes <= limit_ - held_; }

  // Memory for the current capture: memory that this capture has freed, or else free memory of the
  // device. Null if nothing fits.
  c10::Storage takeForCapture(size_t nbytes, c10::Device device);
  void giveToCapture(c10::Storage memory, c10::Device device) {
    const Size size(device.index(), memory.nbytes());
    ofCapture_.emplace_hint(ofCapture_.lower_bound(size), size, std::move(memory));
  }
  void captureIsOver();

  // Keeps memory whose address a graph has recorded, after the end of the capture.
  void giveToGraph(c10::Storage memory) { ofGraphs_.push_back(std::move(memory)); }

 private:
  struct Free {
    c10::Storage memory;
    TransferEventPtr lastCopy;  // see give()
  };
  using Size = std::pair<c10::DeviceIndex, size_t>;

  c10::Storage takeFree(size_t nbytes, c10::Device device, HostUser user);
  c10::Storage takeNew(size_t nbytes, c10::Device device, bool anyway);
  c10::Storage allocate(size_t nbytes, c10::Device device);
  void freeUntil(size_t bytes, c10::Device first);

  Transfer& via_;                                // allocates the memory
  std::multimap<Size, Free> free_;               // unused memory; of equal sizes, earliest first
  std::multimap<Size, c10::Storage> ofCapture_;  // free memory of the current capture
  std::vector<c10::Storage> ofGraphs_;
  size_t limit_ = 0;  // bytes
  size_t held_ = 0;   // bytes, in use or not
  size_t used_ = 0;   // bytes in use
};

}  // namespace ebb
