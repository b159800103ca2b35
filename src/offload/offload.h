// The offload engine: bytes that leave a device after forward has made them, and come back before
// backward needs them.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "ebb/offload.h"
#include "memory/arena.h"
#include "memory/stash.h"
#include "report/transfer_account.h"
#include "transfer/host_pool.h"
#include "transfer/transfer.h"

namespace ebb {

class Offload;

// One storage's bytes, on the device, away, or on their way.
class EBB_API Stash final : public Away, public InArena {
 public:
  Stash(
      std::shared_ptr<Offload> engine,
      c10::Storage bytes,
      size_t nbytes,
      TransferAccountPtr account,
      c10::Stream stream);

  size_t nbytes() const {
    return nbytes_;
  }
  ~Stash() override;

  c10::Storage fetch(const c10::Storage& living) override;
  void beforeWrite() override;

 private:
  friend class Offload;
  // Whether the storage on the device still has the memory that was sent.
  bool hasWhatWasSent() const {
    return onDevice_.nbytes() >= nbytes_ && onDevice_.data() == address_;
  }
  enum class State : uint8_t {
    Kept,       // still on the device: no copy was made, since it is among the last
    Leaving,    // being copied to the host
    Away,       // on the host only; being copied to disk if `written_` is set
    Spilled,    // on disk only
    Reading,    // being copied from disk to the host
    Returning,  // being copied back
    Back,       // fetched: the engine has nothing to do with it any more
  };
  using BySequence =
      std::map<uint64_t, Stash*, std::less<>, ArenaAllocator<std::pair<const uint64_t, Stash*>>>;

  const std::shared_ptr<Offload> engine_;  // that sent it
  const size_t nbytes_;
  const c10::Device device_;
  const c10::Stream packedOn_;  // the compute stream when it was sent: backward will run there
  const TransferAccountPtr account_;  // where its transfers are booked
  State state_ = State::Kept;
  bool lost_ = false;         // its storage got other memory before the copy was known done
  bool ahead_ = false;        // counted in Offload::aheadBytes_
  c10::Storage onDevice_;     // null while it is away
  const void* address_;       // of the bytes that were sent
  c10::Storage onHost_;       // null when it is not needed any more
  c10::Storage onDisk_;       // room on disk; null but while it is needed
  EventPtr left_;             // the end of the copy to the host
  EventPtr written_;          // the end of the copy to disk
  EventPtr read_;             // the end of the copy from disk
  EventPtr returned_;         // the end of the copy back
  uint64_t sequence_ = 0;     // numbers them in the order of sending
  BySequence* in_ = nullptr;  // Offload::away_ or spilled_, if it is in one of them
  BySequence::iterator at_;   // there
};
using StashPtr = c10::intrusive_ptr<Stash>;

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
// Note [Spilling]
// If host memory is full and there is a disk tier, what was sent first, and so is needed last,
// moves on to disk. The host waits until there is room. Reading starts ahead of need if host memory
// allows.
//
// Note [Transfers in a CUDA graph]
// While a graph is captured the host may not ask whether an event is over, nor wait for it. In
// static mode it never does: the compute stream waits in its place, memory is then free for what
// comes after on that stream, and when nothing is away any more all work has come back to the
// compute stream, as a capture demands. Host memory is never freed, since a graph has its address.
//
// Note [Lists of what may be dying]
// kept_, away_ and spilled_ do not keep a stash alive. Another thread may be dropping the last
// reference, and wait for the lock to take the stash from the list. So whoever finds it there asks.
//
// Note [Nothing dies under the engine's lock]
// The last reference to a storage may take the GIL, if Python has seen it, and whoever holds the
// GIL may wait for the engine. So what the engine lets go is collected, and dropped when its lock
// has been given back.
//
// Note [One engine for each transfer]
// Events, host memory and streams are a transfer's own, and which transfer is the usual one changes
// when a backend is registered, or a test puts a fake in place. So each transfer has an engine, and
// a stash goes on with the one that sent it. Settings, counts and the lock are shared by all.
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
  StashPtr send(const c10::Storage& storage, size_t nbytes, const TransferAccountPtr& account);

  // The bytes on the device, for the current stream; starts fetching what was sent before it.
  // `living` is the storage that was sent if somebody else holds it: then nothing is copied. Throws
  // if the storage was given other memory while it was being copied.
  c10::Storage fetch(Stash& stash, const c10::Storage& living = {});

  // The storage that was sent is about to be written on the current stream.
  void beforeWrite(Stash& stash);

  OffloadStats stats();

  // Waits for all copies and frees what host memory is not in use.
  void drain();

 private:
  friend class Stash;

  struct Shared;
  static Shared& shared();

  class Lock {
   public:
    Lock();
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
  };

  // Memory that must live until an event.
  struct Held {
    EventPtr until;
    c10::Stream stream;  // whose memory it is
    c10::Storage onDevice;
    c10::Storage onHost;  // goes back to the pool
  };

  c10::Storage hostMemory(size_t nbytes, c10::Device device);
  bool makeRoom(size_t nbytes);
  bool startSpilling(Stash& stash);
  void startReading(Stash& stash, c10::Storage memory);
  void bringToHost(Stash& stash);
  void settleDisk(Stash& stash);
  void wasRead(Stash& stash);
  void reapDisk();
  static void checkDone(const Stash& stash, const Event& event);
  void list(Stash& stash, Stash::BySequence* where);
  void startLeaving(const StashPtr& stash);
  void waitForFirst();
  void hasLeft();
  void startReturning(const StashPtr& stash);
  void fetchAhead(uint64_t sequence, c10::Stream compute);
  Stash* lastBefore(uint64_t sequence) const;
  void takeReturning(Stash& stash, c10::Stream compute);
  void moveToStream(Stash& stash, c10::Stream compute);
  void notAhead(Stash& stash);
  void keepNoMore(Stash& stash);
  void keepCopy(Stash& stash);
  void stayed(Stash& stash);
  void warnOfFailure(const Stash& stash, const char* remains, const std::string& error);
  void giveHostMemory(Stash& stash);
  void reap();
  void reapDone();
  void reapUnused();
  void letGo();
  void drop(c10::Storage& storage);
  void joinAll();
  void forget(Stash& stash);
  static StashPtr ifAlive(Stash* listed);
  static bool remove(std::deque<StashPtr>& queue, Stash& stash);

  const std::shared_ptr<Transfer> owned_;
  Transfer& via_;                    // owned_
  const OffloadSettings& settings_;  // of all engines
  OffloadStats& stats_;              // likewise: counts
  HostPool pool_;                    // host memory, in use and free
  size_t count_ = 0;                 // of those that were sent and not fetched
  uint64_t lastSequence_ = 0;        // of the stash that was sent last
  std::deque<Stash*> kept_;          // the last ones, of which no copy was made
  std::deque<StashPtr> leaving_;     // in the order of their copies
  Stash::BySequence away_;           // on the host and not on their way anywhere
  Stash::BySequence spilled_;        // on disk
  std::deque<StashPtr> spilling_;    // in the order of their writes
  std::deque<StashPtr> reading_;     // in the order of their reads
  std::deque<StashPtr> returning_;   // in the order of their copies back
  std::deque<Held> held_;            // in the order of their events
  size_t leavingBytes_ = 0;          // of leaving_
  size_t aheadBytes_ = 0;            // fetched ahead and not asked for yet
  int process_;                      // whose host memory this is
};

}  // namespace ebb
