// The bytes in use: on a device, by the process, and by tensors in host memory.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <optional>

#include "ebb/export.h"

namespace ebb {

// The accelerator that this process has begun to use, or else the CPU. Initialises no device.
EBB_API c10::Device deviceInUse();

// For an accelerator, the bytes that its allocator has handed out and cannot reuse yet, including
// bytes that wait for another stream. For the CPU, the resident bytes of the process.
EBB_API size_t bytesInUse(c10::Device device);

// Memory that an allocator has taken from its device.
struct CacheBytes {
  size_t taken;       // all of it
  size_t returnable;  // pieces without a tensor, which it returns when memory is short
};

// Empty if the allocator has no statistics.
std::optional<CacheBytes> cacheBytes(c10::Device device);

// For tests: if not 0, bytesInUse() returns this number.
EBB_API extern std::atomic<size_t> insteadOfBytesInUse;

// For tests: if set, an allocation of host memory fails where this returns true.
EBB_API extern std::atomic<bool (*)(size_t nbytes)> failsHostAllocation;

// Note [Peaks on an accelerator]
// The program reads and resets the allocator's peak, so ebb only reads it. If the allocator's peak
// has changed since ebb began to count, the new peak is that of the time since then. Otherwise the
// peak since then is unknown, and at most the allocator's; unless a memory log of ebb's, as in
// steps that ebb profiles and times, has seen each allocation.

// Bytes of all tensors on a device.
struct TensorBytes {
  size_t now;
  size_t most;   // since counting began
  bool isExact;  // false: `most` may be too high
};

// From now on, ebb counts new tensors in host memory, not earlier ones, and gives memory back if an
// allocation of one fails.
EBB_API void useCountingAllocator();

// Note [Several peaks at a time]
// A budget, and each reader of metrics, needs the peak since a moment of its own, but ebb's count
// of the peak has one beginning. When one of them begins anew, the peak so far is added to what the
// others have, and the count begins anew. So an allocation costs the same for any number of them.

// The peak since begin().
class EBB_API PeakWindow {
 public:
  PeakWindow();
  ~PeakWindow();
  PeakWindow(const PeakWindow&) = delete;
  PeakWindow& operator=(const PeakWindow&) = delete;

  // Begins to count `most`.
  void begin(c10::Device device);
  // The bytes of tensors on a device; on the CPU, of counted tensors only.
  TensorBytes read(c10::Device device) const;

 private:
  void add(const TensorBytes& part);

  // All members are guarded by the mutex of all windows.
  c10::Device device_{c10::kCPU};  // of the last begin()
  size_t exact_ = 0;               // most bytes before the count last began anew, where exact
  size_t most_ = 0;                // the same, exact or not
};

// The same for a budget's window.
EBB_API TensorBytes tensorBytes(c10::Device device);
EBB_API void resetMostTensorBytes(c10::Device device);

// A memory log begins, or ends, to call noteAllocated() for each allocation.
void beginNotingAllocations();
void endNotingAllocations();

// Bytes of all tensors on an accelerator, after an allocation.
void noteAllocated(size_t total);

}  // namespace ebb
