// What the offload engine does when host memory is full.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <deque>

#include "offload/copies.h"
#include "offload/host_stash.h"
#include "offload/offload_context.h"

namespace ebb {

// Note [Spilling]
// If host memory is full and there is a disk tier, what was sent first, and so is needed last,
// moves on to disk. The host waits until there is room. Reading starts ahead of need if host memory
// allows.
class Spill {
 public:
  Spill(OffloadContext& context, Copies& copies) : context_(context), copies_(copies) {
  }

  // Host memory for what leaves the device; null if there is none and none can be made.
  c10::Storage hostMemory(size_t nbytes, c10::Device device);

  // Starts to read what is on disk. False if there is no host memory for it.
  bool readAhead(HostStash& stash);

  // It is needed on the device, so it must be in host memory first.
  void bringToHost(HostStash& stash);

  // Waits for what is under way to or from disk.
  void settle(HostStash& stash);

  // Takes note of reads and writes that are done.
  void reap();

  void finishAll();

 private:
  c10::Storage hostMemoryOfCapture(size_t nbytes, c10::Device device);
  bool makeRoom(size_t nbytes);
  void startSpilling(size_t nbytes);
  bool startWriting(HostStash& stash);
  void startReading(HostStash& stash, c10::Storage memory);
  void wasWritten(HostStash& stash);
  void wasRead(HostStash& stash);

  OffloadContext& context_;
  Copies& copies_;
  std::deque<HostStashPtr> spilling_;  // in the order of their writes
  std::deque<HostStashPtr> reading_;   // in the order of their reads
};

}  // namespace ebb
