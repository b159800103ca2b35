// The offload engine copies bytes to the host after forward has produced them, and back before
// backward needs them.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "ebb/offload.h"
#include "plugins/offload/accounts.h"
#include "plugins/offload/copies.h"
#include "plugins/offload/host_stash.h"
#include "plugins/offload/offload_context.h"
#include "plugins/offload/spill.h"
#include "plugins/offload/transfer/transfer.h"

namespace ebb {

// Stretches of forward, the units of time of OFFLOAD: see Note [Release in stream order].
class Stretches {
 public:
  // Counts a value that is sent. Returns true if the stretch is full.
  bool add(size_t nbytes) {
    constexpr size_t kMostValues = 16;
    nbytes_ += nbytes;
    return ++values_ == kMostValues;
  }

  // Ends the current stretch. Returns false if it has no value.
  bool end() {
    longest_ = std::max(longest_, std::exchange(nbytes_, 0));
    current_ += values_ > 0;
    return std::exchange(values_, 0) > 0;
  }

  // Number of the current stretch.
  uint64_t current() const { return current_; }

  // Backward needs a value of a stretch. Returns true if its last value was of another stretch.
  bool moveTo(uint64_t stretch) { return std::exchange(inBackward_, stretch) != stretch; }

  // Bytes of two stretches, as the largest one of this step.
  size_t bytesOfTwo() const { return 2 * std::max(longest_, nbytes_); }

  // No value is away any more.
  void stepIsOver() { longest_ = 0; }

 private:
  uint64_t current_ = 0;
  size_t values_ = 0;  // of the current stretch
  size_t nbytes_ = 0;  // of the current stretch
  size_t longest_ = 0;
  uint64_t inBackward_ = 0;
};

// Note [One engine for each transfer]
// Events, host memory and streams belong to a transfer. The default transfer changes when a backend
// is registered or a test installs a fake. So each transfer has an engine, and a stash stays with
// the engine that sent the stash. All engines share settings, counts and the lock.
class EBB_API Offload : public std::enable_shared_from_this<Offload> {
 public:
  explicit Offload(std::shared_ptr<Transfer> via);

  Transfer& transfer() { return via_; }

  // True if a tensor's storage may be sent: on a device, large enough, and not excluded by the
  // user.
  bool takes(const at::Tensor& tensor);

  // Starts to move `nbytes` of `storage` away; the caller drops its own reference. Null if there is
  // no host memory.
  HostStashPtr send(const c10::Storage& storage, size_t nbytes, const TransferAccountPtr& account);

  // The bytes on the device, for the current stream. Starts to prefetch values that were sent
  // before the stash. `living` is the sent storage if other code still holds the storage; then
  // nothing is copied. Throws if the storage got other memory during the copy. If an allocation
  // fails, the caller may try again: the engine frees released memory only when it unlocks.
  c10::Storage fetch(HostStash& stash, const c10::Storage& living = {});

  // The sent storage is about to be written on the current stream.
  void beforeWrite(HostStash& stash);

  // An outermost region of this thread ends, and has sent values. Does not throw.
  void regionEnds();

  // Called by the stash's destructor.
  void forget(HostStash& stash);

  // Releases memory of leaving values on `device`: see Note [Memory given back]. False if there is
  // none.
  bool giveBack(c10::Device device);

  OffloadStats stats();

  // Releases the memory of leaving values, and frees unused host memory after its last copies.
  // Waits for all copies to and from disk.
  void drain();

 private:
  void enter(c10::Device device);
  void reap();
  void checkPlace(const HostStash& stash) const;
  void takeLiving(HostStash& stash, const c10::Storage& living);
  void bringBack(HostStash& stash, c10::Stream compute);
  void takeBack(HostStash& stash, c10::Stream compute);
  void fetchAhead(const HostStash& stash);
  HostStash* lastBefore(uint64_t sequence) const;
  void notAheadAnyMore(HostStash& stash);

  const std::shared_ptr<Transfer> owned_;
  Transfer& via_;  // owned_
  OffloadContext context_;
  Copies copies_{context_};
  Spill spill_{context_, copies_};
  uint64_t lastSequence_ = 0;  // of the latest stash sent
  size_t aheadBytes_ = 0;      // prefetched and not needed yet
  bool triesAhead_ = true;     // no prefetch has failed for lack of device memory since the last
                               // send
  Stretches stretches_;
};

// The engine for new stashes: for torch's accelerator, or between memory and disk without an
// accelerator, unless a test has installed another.
EBB_API Offload& offloadEngine();

// Installs a test's engine; null restores the default.
EBB_API void putEngineInPlace(std::shared_ptr<Offload> instead);

// Sets the function that is true for tensors that the user has excluded from offloading. Called
// once, at import.
EBB_API void setOffloadOptOut(bool (*optedOut)(const at::Tensor&));

}  // namespace ebb
