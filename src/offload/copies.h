// Copies between a device and the host that are under way.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <deque>

#include "offload/host_stash.h"
#include "offload/offload_context.h"
#include "transfer/transfer.h"

namespace ebb {

// Note [The order of offloading]
// Copies run on two streams of ours, one in each direction, beside the compute streams.
// 1. A copy to the host runs after what the compute stream was given when the tensor was packed,
//    whichever stream is current when it leaves: what is kept for a while leaves later.
// 2. The device's bytes are released when that copy is done, which is looked for at each pack and
//    unpack, and not before: no stream is told to hold them (record_stream), so they are free at
//    once.
// 3. Whoever writes to the storage before waits, on its stream, for the copy.
// 4. A copy back runs after the copy to the host, whoever asks for it, and after what the compute
//    stream was given, for whose use its memory was allocated.
// 5. The compute stream, read at each use, waits for the copy back.
// 6. Host memory is used again when the copy back is done.
// Bytes that are needed while they leave are still on the device, and are served from there.
//
// Note [Transfers in a CUDA graph]
// While a graph is captured the host may not ask whether an event is over, nor wait for it. In
// static mode it never does: the compute stream waits in its place, memory is then free for what
// comes after on that stream, and when nothing is away any more all work has come back to the
// compute stream, as a capture demands. Host memory is never freed, since a graph has its address.
class Copies {
 public:
  explicit Copies(OffloadContext& context) : context_(context) {
  }

  // To the host.
  void startLeaving(const HostStashPtr& stash);
  size_t leavingBytes() const {
    return leavingBytes_;
  }

  // The storage of what is leaving is about to be written on the current stream.
  void finishLeaving(HostStash& stash);

  // To the device.
  void startReturning(const HostStashPtr& stash);

  // `compute` may read what is being copied back.
  void takeReturning(HostStash& stash, c10::Stream compute);

  // Nobody needs the memory that it is being copied back to.
  void giveDeviceMemory(HostStash& stash);

  // Nobody needs its copy on the host.
  void giveHostMemory(HostStash& stash);

  // Takes note of copies that are done; those to and from disk are Spill's.
  void reap();

  // In static mode: nobody asks whether a copy is done, but of what nobody will fetch any more the
  // compute stream waits for all.
  void reapUnused();

  // The compute streams wait for all.
  void joinAll();

  // The host waits for all, and for one that gives host memory back; false if there is none.
  void finishAll();
  bool finishOne();

 private:
  // Memory that must live until an event.
  struct Held {
    EventPtr until;
    c10::Stream stream;  // whose memory it is
    c10::Storage onDevice;
    c10::Storage onHost;  // goes back to the pool
  };

  void waitForFirst();
  void firstHasLeft();
  void firstHasReturned();
  void stays(HostStash& stash);
  void moveToCopy(HostStash& stash);
  void moveToStream(HostStash& stash, c10::Stream compute);
  void releaseFirstHeld();

  OffloadContext& context_;
  Transfer& via_ = context_.via;
  std::deque<HostStashPtr> leaving_;    // in the order of their copies
  std::deque<HostStashPtr> returning_;  // in the order of their copies back
  std::deque<Held> held_;               // in the order of their events
  size_t leavingBytes_ = 0;             // of leaving_
};

}  // namespace ebb
