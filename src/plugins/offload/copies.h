// Copies in progress between a device and the host.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>

#include "plugins/offload/host_stash.h"
#include "plugins/offload/offload_context.h"
#include "plugins/offload/transfer/transfer.h"
#include "stores/capture_watch.h"

namespace ebb {

// Note [The order of offloading]
// Copies run on two streams of ebb's, one per direction, beside the compute streams.
// 1. A copy to the host runs after all work given to the compute stream by the time of packing,
//    even if another stream is current when the copy starts (values that stay on the device for a
//    while leave later).
// 2. The device memory is released in the order of the compute stream: see Note [Release in stream
//    order]. Without ebb, autograd would hold the memory until backward. With ebb, the stream that
//    packed the value may still read the memory when the memory is freed. So record_stream tells
//    the allocator about that stream; the call does nothing if the memory was allocated on that
//    stream. The allocator does not know about the copying streams, so their work does not delay
//    the reuse of the memory.
// 3. If the program writes to the storage before the copy is done, the writing stream waits for the
//    copy.
// 4. Any thread may start a copy back. The copy back runs after the copy to the host, and after all
//    work given so far to the compute stream for which the device memory was allocated.
// 5. The compute stream waits for the copy back. ebb asks torch for the compute stream at each use,
//    since the current stream may change.
// 6. The outgoing stream waits for the copy back, and then uses the host memory again.
// A value needed while leaving is still on the device, and is served from there.
//
// Note [Release in stream order]
// The host runs ahead of the device. If the host released the memory of a value when it saw that
// the copy is done, the peak would grow with the host's lead. So the host never asks. The compute
// stream that packed the value waits for the copy, and the host releases the memory at once. The
// allocator hands out memory in the order of that stream, so the next user of the memory runs after
// the copy. The copy gets time first: the wait comes at the second end of a stretch after the value
// was sent. A stretch is an outermost region that sends values, or 16 values of a larger region.
// The wait comes earlier if `inFlightBytes` are exceeded, if an allocation fails, or if no value is
// away any more. In backward, a stretch ends when backward comes to another stretch. Then only
// values that backward has taken from the device are released, since backward is about to need the
// others. In forward, the end of a stretch counts only for values packed on the current stream, so
// a thread does not wait sooner because of another thread. Where the "host" is the disk, a wait of
// the compute stream would block the host, and the host is not ahead of the compute stream. So the
// host asks there, and waits only at the limit.
//
// Note [Transfers in a CUDA graph]
// During a CUDA graph capture the host may not query or wait for an event. The engine does neither
// for its own copies. Once no value is away, all work has joined the compute stream, as a capture
// demands. Host memory of a capture is never freed: see Note [Whose host memory it is]. Captured
// work runs when the graph is launched and other work runs at once, so neither may wait for the
// other. Copies in progress outside are put aside when a capture begins. Copies that a failed
// capture left in progress are forgotten when the capture is over. The outgoing stream joins the
// capture with the first copy, so a capture is over when that stream is no longer captured.
//
// Copies has many methods: one for each step in the life of a stash, and some for all stashes.
class Copies {
 public:
  explicit Copies(OffloadContext& context) : context_(context) {}

  // Notices the begin or end of a capture; must be called before all other methods. Without
  // `device`: uses the device of the last call.
  void noticeCapture(c10::Device device);
  void noticeCapture();

  // The number of the current capture; 0: none.
  uint64_t capture() const { return captures_.current(); }

  // Sends a stash to the host once keepLast later stashes have been sent; at once if keepLast is 0.
  void send(HostStash& stash);
  size_t leavingBytes() const { return now_.leavingBytes + outside_.leavingBytes; }

  // Number of stashes sent and not yet fetched.
  size_t unfetched() const { return now_.unfetched + outside_.unfetched; }

  // Like unfetched(), but only the stashes for which isHere() is true.
  size_t unfetchedHere() const { return now_.unfetched; }

  // Called before a write, on the current stream, to the storage of a stash. If the bytes are still
  // on the device, the copy to the host comes first.
  void beforeWrite(HostStash& stash);

  // A stretch of forward ends on this thread: see Note [Release in stream order].
  void stretchEnds();

  // Backward has come to another stretch.
  void backwardMovesOn();

  // Starts the copy back to the device.
  void startReturning(HostStash& stash);

  // Makes the stream `compute` wait for the copy back of the stash. The memory of the copy may have
  // been allocated for another stream.
  void takeReturning(HostStash& stash, c10::Stream compute);

  // Makes the stream `compute` wait until a fetched stash can be read. The stash may have been
  // fetched for another stream.
  void handOver(HostStash& stash, c10::Stream compute);

  // The copy back of the stash has started, but no code needs the result any more.
  void dropReturning(HostStash& stash);

  // The stash was fetched; from now on only copies in progress need its memory.
  void fetched(HostStash& stash);

  // The stash is dying and will not be fetched. Throws nothing.
  void forget(HostStash& stash);

  // Where the "host" is the disk: handles copies that are done. Spill handles copies between host
  // and disk.
  void reap();

  // The compute stream waits for the copy to the host that started first, whose device memory is
  // released. False if there is none.
  bool waitForFirst();

  // The compute streams wait for all copies, whose memory is released, and freed when the engine's
  // lock is released. False if there is none.
  bool joinAll();

  // True if the stash was sent in the current capture or, without a capture, outside of all
  // captures.
  bool isHere(const HostStash& stash) const { return stash.sent.capture == capture(); }

 private:
  // Memory of a stash: on the device, on the host, or both.
  struct Memory {
    c10::Storage onDevice;
    c10::Storage onHost;
  };

  // A copy to the host, or a copy back that no code needs any more.
  struct Leaving {
    HostStash* stash;  // see Note [Lists of stashes that may be dying]; null: the stash is dead
    TransferEventPtr left;
    c10::Stream packedOn;  // waits for `left`
    TransferAccountPtr account;
    size_t nbytes;
    Memory memory;  // of a dead stash
    bool isBack = false;
    size_t stretches = 0;  // that have ended: see Note [Release in stream order]
  };

  // Copies in progress, either in a capture or outside of all captures.
  struct UnderWay {
    std::deque<HostStash*> kept;  // the last keepLast stashes, not copied
    std::deque<Leaving> leaving;  // in the order in which they began or were dropped
    size_t leavingBytes = 0;
    size_t unfetched = 0;
  };

  UnderWay* placeOf(const HostStash& stash);
  void endCapture();
  void startLeaving(HostStash& stash);
  bool mayWait(c10::Stream compute);
  void join(const Leaving& leaving);
  void release(const std::function<bool(Leaving&)>& isOver);
  void hasLeft(Leaving& leaving);
  void finishLeaving(HostStash& stash);
  void moveToCopy(HostStash& stash);
  void give(
      c10::Storage& onHost, c10::Device device, uint64_t usedIn, const TransferEventPtr& lastCopy);

  OffloadContext& context_;
  Transfer& via_ = context_.via;
  UnderWay now_;
  UnderWay outside_;                   // copies put aside during a capture
  CaptureWatch captures_;              // of the compute streams
  std::optional<c10::Device> device_;  // device of the last call; during a capture, the capture's
                                       // device
};

}  // namespace ebb
