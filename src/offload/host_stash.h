// One storage's bytes, on the device, away, or on their way.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "memory/arena.h"
#include "memory/stash.h"
#include "report/transfer_account.h"
#include "transfer/transfer.h"

namespace ebb {

class Offload;
struct HostStash;
using HostStashPtr = c10::intrusive_ptr<HostStash>;

// Stashes in the order in which they were sent. A stash is in one such list at most.
//
// Note [Lists of what may be dying]
// Lists of what is under way keep their stashes alive; lists of what is not do not. Another thread
// may be dropping the last reference to what is in them, and wait for the lock to take it out. So
// whoever finds a stash there asks with ifAlive().
class StashesInOrder {
 public:
  void add(HostStash& stash);
  static void takeOut(HostStash& stash);

  // The first, and the latest of those sent before `sequence`; null if there is none.
  HostStash* first() const;
  HostStash* lastBefore(uint64_t sequence) const;

  using Map = std::
      map<uint64_t, HostStash*, std::less<>, ArenaAllocator<std::pair<const uint64_t, HostStash*>>>;

 private:
  Map stashes_;  // by their sequence
};

// Only the engine that sent it looks inside, under its lock, so its members are the engine's. They
// are many, since one stash is what one value costs: it is one block of memory.
struct EBB_API HostStash final : Stash, InArena {
  enum class State : uint8_t {
    Kept,       // still on the device: no copy was made, since it is among the last
    Leaving,    // being copied to the host
    Away,       // on the host only; being copied to disk if `written` is set
    Spilled,    // on disk only
    Reading,    // being copied from disk to the host
    Returning,  // being copied back
    Back,       // fetched: the engine has nothing to do with it any more
  };

  HostStash(
      std::shared_ptr<Offload> sender,
      c10::Storage bytes,
      size_t size,
      TransferAccountPtr bookedOn,
      c10::Stream stream);
  ~HostStash() override;

  c10::Storage fetch(const c10::Storage& living) override;
  c10::Storage fetchAhead(const c10::Storage& living) override {
    return fetch(living);
  }
  void beforeWrite() override;

  // Whether the storage on the device still has the memory that was sent.
  bool hasWhatWasSent() const {
    return onDevice.nbytes() >= nbytes && onDevice.data() == address;
  }

  // Throws if the copy before `event`, by which its bytes came back, failed.
  void checkCameBack(const Event& event) const;

  const std::shared_ptr<Offload> engine;  // that sent it
  const size_t nbytes;
  const c10::Device device;
  const c10::Stream packedOn;        // the compute stream when it was sent
  const TransferAccountPtr account;  // where its transfers are booked
  State state = State::Kept;
  bool lost = false;      // its storage got other memory before the copy was known done
  bool ahead = false;     // fetched, and not asked for yet
  c10::Storage onDevice;  // null while it is away
  const void* address;    // of the bytes that were sent
  c10::Storage onHost;    // null when it is not needed any more
  c10::Storage onDisk;    // room on disk; null but while it is needed
  EventPtr left;          // the end of the copy to the host
  EventPtr written;       // the end of the copy to disk
  EventPtr read;          // the end of the copy from disk
  EventPtr returned;      // the end of the copy back
  std::optional<c10::Stream> takenOn;  // the stream that it is fetched for
  uint64_t capture = 0;                // in which it was sent; see Copies::capture()
  uint64_t sequence = 0;               // numbers them in the order of sending
  StashesInOrder::Map* in = nullptr;   // the list it is in, if any
  StashesInOrder::Map::iterator at;    // there
};

// Null if its last reference is going: see Note [Lists of what may be dying].
HostStashPtr ifAlive(HostStash* listed);

// Takes `stash`, to which the caller has a reference, out of `queue`. Whether it was there.
bool takeOut(std::deque<HostStashPtr>& queue, HostStash& stash);

}  // namespace ebb
