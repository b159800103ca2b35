// Copies between a device and the host that are under way.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "offload/host_stash.h"
#include "offload/offload_context.h"
#include "transfer/transfer.h"

namespace ebb {

// Note [The order of offloading]
// Copies run on two streams of ours, one in each direction, beside the compute streams.
// 1. A copy to the host runs after what the compute stream was given when the tensor was packed,
//    whichever stream is current when it leaves: what is kept for a while leaves later.
// 2. The device's bytes are released when that copy is done, which is looked for at each pack and
//    unpack, and not before. The stream that packed it is told to the allocator (record_stream),
//    which asks for nothing where it is the one they were allocated on: autograd would have held
//    them until backward. The copying streams are not told, so bytes are free at once.
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
// compute stream, as a capture demands. Host memory is never freed: see Note [Whose host memory it
// is].
// What is captured runs when its graph is replayed, and what is not runs at once, so neither may
// wait for the other. What is under way outside is put aside when a capture begins, and what a
// capture has left under way, having failed, is forgotten when it is over. It goes on while the
// stream is captured on which bytes leave: that takes part from the first copy on, and is not in
// the next capture before its first copy.
//
// Its methods are many: what becomes of a stash, step by step, and what is asked of all of them.
class Copies {
 public:
  explicit Copies(OffloadContext& context) : context_(context) {
  }

  // Whether a capture has begun or ended; comes before all else. Without a device: that of the last
  // call with one.
  void noticeCapture(c10::Device device);
  void noticeCapture();

  // Numbers captures; 0: none goes on.
  uint64_t capture() const {
    return capture_;
  }

  // To the host.
  void send(HostStash& stash);
  size_t leavingBytes() const {
    return now_.leavingBytes + outside_.leavingBytes;
  }

  // How many were sent and not fetched; here: in the capture that goes on, or outside of all.
  size_t unfetched() const {
    return now_.unfetched + outside_.unfetched;
  }
  size_t unfetchedHere() const {
    return now_.unfetched;
  }

  // The storage of what has not left is about to be written on the current stream.
  void beforeWrite(HostStash& stash);

  // To the device.
  void startReturning(HostStash& stash);

  // `compute` may read what is being copied back, perhaps to memory of another stream's.
  void takeReturning(HostStash& stash, c10::Stream compute);

  // It was fetched, for the stream of `takenOn`; `compute` may read it too.
  void handOver(HostStash& stash, c10::Stream compute);

  // Nobody needs the memory that it is being copied back to.
  void giveDeviceMemory(HostStash& stash);

  // It was fetched, so only copies that are under way need what it holds.
  void fetched(HostStash& stash);

  // Nobody will fetch it, and it goes. Throws nothing.
  void forget(HostStash& stash);

  // Takes note of copies that are done; those to and from disk are Spill's.
  void reap();

  // In static mode: nobody asks whether a copy is done, but of what nobody will fetch any more the
  // compute stream waits for all.
  void reapUnused();

  // The host waits for all, and for one that gives host memory back; false if there is none.
  void finishAll();
  bool finishOne();

  // Device memory of what is leaving becomes free, as soon as the lock is given back. False if
  // nothing is leaving.
  bool freeLeaving();

  // Whether it was sent where we are: in the capture that goes on, or outside of all.
  bool isHere(const HostStash& stash) const {
    return stash.capture == capture_;
  }

 private:
  // A copy to the host. Its stash may be gone before it is done; then the bytes are here.
  struct Leaving {
    HostStash* stash;  // see Note [Lists of what may be dying]; null: it is gone
    EventPtr left;
    c10::Stream packedOn;
    c10::Device device;
    TransferAccountPtr account;
    size_t nbytes;
    c10::Storage onDevice;
    c10::Storage onHost;
  };

  // Memory that must live until an event.
  struct Held {
    EventPtr until;
    c10::Stream stream;  // whose memory it is
    c10::Storage onDevice;
    c10::Storage onHost;  // is given back
    c10::Device device;
  };

  // In a capture, or outside of all.
  struct UnderWay {
    std::deque<HostStash*> kept;       // the last ones, of which no copy was made
    std::deque<Leaving> leaving;       // in the order of their copies
    std::deque<HostStash*> returning;  // in the order of their copies back
    std::deque<Held> held;             // in the order of their events
    size_t leavingBytes = 0;
    size_t unfetched = 0;
  };

  UnderWay* placeOf(const HostStash& stash);
  void endCapture();
  void startLeaving(HostStash& stash);
  void waitForFirst();
  void firstHasLeft();
  void finishLeaving(HostStash& stash);
  void firstHasReturned();
  void releaseFirstHeld();
  void stays(HostStash& stash, const Event& left);
  void moveToCopy(HostStash& stash);
  void joinLeaving();
  void joinAll();
  void giveHostMemory(HostStash& stash);
  void give(c10::Storage& onHost, c10::Device device, uint64_t capture);
  bool isKnownDone(const Event& event);

  OffloadContext& context_;
  Transfer& via_ = context_.via;
  UnderWay now_;
  UnderWay outside_;                   // put aside while a graph is captured
  uint64_t capture_ = 0;               // see capture()
  uint64_t captures_ = 0;              // so far
  bool copied_ = false;                // in this capture
  std::optional<c10::Device> device_;  // of the last call; of the capture, while one goes on
  std::vector<c10::Device> devices_;   // from which anything has left
};

}  // namespace ebb
