// The bytes of one storage: on the device, away, or being copied.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "hooks/store.h"
#include "memory/arena.h"
#include "plugins/offload/accounts.h"
#include "plugins/offload/transfer/transfer.h"

namespace ebb {

class Offload;
struct HostStash;
using HostStashPtr = c10::intrusive_ptr<HostStash>;

// Note [Lists of stashes that may be dying]
// Lists of copies to and from disk keep their stashes alive; other lists do not. Another thread may
// have dropped the last reference to a listed stash, and may be waiting for the lock to remove the
// stash. So code that finds a stash in such a list must call ifAlive().

// Stashes by HostStash::Sent::sequence.
using StashesInOrder = std::map<
    uint64_t, HostStash*, std::less<>, ArenaAllocator<std::pair<const uint64_t, HostStash*>>>;

// Only the engine that sent the stash accesses the members, under the engine's lock.
struct EBB_API HostStash final : Stash, InArena {
  enum class State : uint8_t {
    NotSent,    // still on the device: the copy has not begun, or has failed
    Leaving,    // being copied to the host
    Away,       // on the host only; if `written` is set, being copied to disk
    Spilled,    // on disk only
    Reading,    // being copied from disk to the host
    Returning,  // being copied back to the device
    Back,       // fetched: the engine is done with the stash
  };

  // The states that may follow each state, and why.
  static constexpr std::pair<State, State> kTransitions[] = {
      {State::NotSent, State::Leaving},  // enough later values were sent, or a write is coming
      {State::NotSent, State::Back},     // backward needs it
      {State::Leaving, State::Away},     // the copy has ended, or a write waits for the copy
      {State::Leaving, State::NotSent},  // the copy failed
      {State::Leaving, State::Back},     // backward needs it: the bytes are still on the device
      {State::Away, State::Returning},   // backward needs it, now or soon
      {State::Away, State::Spilled},     // the copy to disk has ended
      {State::Away, State::Back},        // the program has kept the bytes alive
      {State::Spilled, State::Reading},  // backward needs it, now or soon
      {State::Spilled, State::Back},     // the program has kept the bytes alive
      {State::Reading, State::Away},     // the copy from disk has ended
      {State::Reading, State::Spilled},  // the copy from disk failed
      {State::Returning, State::Back},   // the copy has ended, or the program has kept the bytes
  };

  HostStash(
      std::shared_ptr<Offload> sender, c10::Storage bytes, size_t size, TransferAccountPtr bookedOn,
      c10::Stream stream);
  ~HostStash() override;

  c10::Storage fetch(const c10::Storage& living) override;
  c10::Storage fetchAhead(const c10::Storage& living) override { return fetch(living); }
  void beforeWrite() override;

  // True if the storage on the device still has the memory that was sent.
  bool hasWhatWasSent() const {
    return onDevice.nbytes() >= sent.nbytes && onDevice.data() == sent.address;
  }

  // Throws if the copy back that ends at `event` failed.
  void checkCameBack(const TransferEvent& event) const;

  // Warns of a failed copy, once: a failing disk fails for every tensor. `remains`: the end of
  // the warning's sentence, such as "stays in memory".
  void warnOfFailure(const char* remains, const std::string& error) const;

  c10::Device device() const { return sent.stream.device(); }

  // The bytes that were sent, and the time of sending.
  struct Sent {
    size_t nbytes;
    c10::Stream stream;  // the compute stream at the time of sending
    const void* address;
    uint64_t capture = 0;   // capture in which the stash was sent; see Copies::capture()
    uint64_t sequence = 0;  // number in the order of sending
    uint64_t stretch = 0;   // number of its stretch: see Note [Release in stream order]
  };

  // The copies to and from disk.
  struct OnDisk {
    c10::Storage room;         // place in the disk file; null: none
    TransferEventPtr written;  // the end of the copy to disk
    TransferEventPtr read;     // the end of the copy from disk
  };

  // The copy back to the device.
  struct Return {
    TransferEventPtr end;
    std::optional<c10::Stream> stream;  // compute stream that gets the bytes
    bool ahead = false;                 // prefetched and not needed yet
  };

  // `next` must be in kTransitions.
  void become(State next);
  State state() const { return state_; }

  const std::shared_ptr<Offload> engine;  // sent the stash
  const TransferAccountPtr account;       // counts the stash's transfers
  c10::Storage onDevice;                  // null while away
  Sent sent;
  bool lost = false;      // the storage got other memory before the copy was known to be done
  TransferEventPtr left;  // the end of the copy to the host
  c10::Storage onHost;    // null once not needed any more
  OnDisk disk;
  Return back;

 private:
  State state_ = State::NotSent;
};

// Null if the last reference is being dropped: see Note [Lists of stashes that may be dying].
HostStashPtr ifAlive(HostStash* listed);

// Removes `stash` from `queue`. False if `queue` lacks `stash`.
template <class Queue>
bool takeOut(Queue& queue, const HostStash& stash) {
  return std::erase_if(queue, [&](const auto& queued) { return &*queued == &stash; }) > 0;
}

}  // namespace ebb
