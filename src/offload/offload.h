// The offload engine: bytes that leave a device after forward has made them, and come back before
// backward needs them.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "ebb/offload.h"
#include "offload/copies.h"
#include "offload/host_stash.h"
#include "offload/offload_context.h"
#include "offload/spill.h"
#include "report/transfer_account.h"
#include "transfer/transfer.h"

namespace ebb {

// Note [One engine for each transfer]
// Events, host memory and streams are a transfer's own, and which transfer is the usual one changes
// when a backend is registered, or a test puts a fake in place. So each transfer has an engine, and
// a stash goes on with the one that sent it. Settings, counts and the lock are shared by all.
//
// Its methods are many: what values, users and stashes ask of it, and under that the way of one
// stash, step by step.
class EBB_API Offload : public std::enable_shared_from_this<Offload> {
 public:
  explicit Offload(std::shared_ptr<Transfer> via);

  // The one for what is sent now: of torch's accelerator, or between memory and disk if there is
  // none, unless a test has put another in its place.
  static Offload& get();

  // Null: the usual one again.
  static void putInPlace(std::shared_ptr<Offload> instead);

  static void configure(const OffloadSettings& settings);
  static OffloadSettings settings();

  Transfer& transfer() {
    return via_;
  }

  // Whether a tensor's storage may be sent: on a device, not too small, and not marked by the user.
  bool takes(const at::Tensor& tensor);

  // Set once, at import: whether the user has marked a tensor not to be sent.
  static void setOptOut(bool (*optedOut)(const at::Tensor&));

  // Starts moving `nbytes` of `storage` away; the caller gives up its own reference. Null if there
  // is no host memory for it.
  HostStashPtr send(const c10::Storage& storage, size_t nbytes, const TransferAccountPtr& account);

  // The bytes on the device, for the current stream; starts fetching what was sent before it.
  // `living` is the storage that was sent if somebody else holds it: then nothing is copied. Throws
  // if the storage was given other memory while it was being copied.
  c10::Storage fetch(HostStash& stash, const c10::Storage& living = {});

  // The storage that was sent is about to be written on the current stream.
  void beforeWrite(HostStash& stash);

  // Nobody will ask for it: its destructor says so.
  void forget(HostStash& stash);

  // Memory that is leaving the device becomes free there, for an allocation that failed; the host
  // waits. False if there is none.
  bool makeRoom();

  OffloadStats stats();

  // Waits for all copies and frees what host memory is not in use.
  void drain();

 private:
  void enter(c10::Device device);
  void reap();
  c10::Storage fetchOnce(HostStash& stash, const c10::Storage& living);
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
  uint64_t lastSequence_ = 0;  // of the stash that was sent last
  size_t aheadBytes_ = 0;      // fetched ahead and not asked for yet
  bool triesAhead_ = true;     // the device has had memory for that since the last send
  bool wasStatic_ = false;     // when it was last asked for anything
  int process_;                // whose host memory this is
};

}  // namespace ebb
