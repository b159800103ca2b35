// The disk tier's part of the offload engine, for when host memory is full.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <deque>

#include "plugins/offload/copies.h"
#include "plugins/offload/host_stash.h"
#include "plugins/offload/offload_context.h"

namespace ebb {

// Note [Spilling]
// If host memory is full and there is a disk tier, the values sent first, and so needed last, move
// on to disk. The host waits until there is room. Reads start ahead of need if host memory allows.
class Spill {
 public:
  Spill(OffloadContext& context, Copies& copies) : context_(context), copies_(copies) {}

  // Host memory for `user`; null if there is none and spilling cannot make room.
  c10::Storage hostMemory(size_t nbytes, c10::Device device, HostUser user);

  // Starts to read a stash from disk. False if there is no host memory.
  bool readAhead(HostStash& stash);

  // Reads the stash to host memory, since the device needs the bytes now.
  void bringToHost(HostStash& stash);

  // Waits for the stash's copies to or from disk.
  void settle(HostStash& stash);

  // Handles reads and writes that are done.
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
  std::deque<HostStashPtr> spilling_;  // in the order of the writes
  std::deque<HostStashPtr> reading_;   // in the order of the reads
};

}  // namespace ebb
