#include "plugins/offload/offload_engine.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <utility>

#include "allocator/in_use.h"
#include "allocator/shortage.h"
#include "memory/bytes.h"
#include "plugins/offload/transfer/disk.h"
#include "stores/dropping_mutex.h"
#include "stream/capture.h"

namespace ebb {
namespace {

using Lock = std::lock_guard<DroppingMutex>;
using State = HostStash::State;

// See Note [Memory given back]. Only the engine between memory and disk can release host memory.
bool giveBackLeaving(c10::Device device) {
  Offload& engine = offloadEngine();
  return engine.transfer().isDevice(device) && engine.giveBack(device);
}

std::atomic<bool> isMade{false};  // an engine of the process

// Never destroyed: threads that outlive static objects may use its streams and events.
Offload& leaked(std::shared_ptr<Transfer> via) {
  isMade.store(true);
  setReserve(Reserve::Leaving, &giveBackLeaving);
  return **new std::shared_ptr<Offload>(std::make_shared<Offload>(std::move(via)));
}

}  // namespace

OffloadShared& OffloadShared::get() {
  // Leaked on purpose, like the engines: handles may outlive static objects.
  static auto* instance = new OffloadShared;
  return *instance;
}

Offload::Offload(std::shared_ptr<Transfer> via)
    : owned_(std::move(via)), via_(*owned_), context_(via_) {}

bool Offload::takes(const at::Tensor& tensor) {
  {
    const Lock lock(context_.shared.mutex);
    const uint64_t nbytes = tensor.storage().nbytes();
    if (nbytes < std::max<size_t>(context_.settings.minBytes, 1)) {
      context_.stats.mostTooSmall = std::max(context_.stats.mostTooSmall, nbytes);
      return false;
    }
  }
  if (!via_.isDevice(tensor.device())) {
    TORCH_WARN_ONCE(
        "ebb: tensors on ", tensor.device(),
        " are saved instead of offloaded: OFFLOAD needs an accelerator or a disk tier "
        "(ebb.config.offload.disk). Shown once.");
    return false;
  }
  // Fetched bytes are aligned, so an unaligned tensor is not offloaded: see Note [Alignment].
  const bool aligned = misalignment(tensor.storage()) == 0;
  const auto optedOut = context_.shared.optedOut;
  return aligned && (optedOut == nullptr || !optedOut(tensor));
}

HostStashPtr Offload::send(
    const c10::Storage& storage, size_t nbytes, const TransferAccountPtr& account) {
  const Lock lock(context_.shared.mutex);
  const c10::Device device = storage.device();
  enter(device);
  triesAhead_ = true;
  // If only another stream is being captured, ebb's streams take part in that capture, and cannot
  // copy this value.
  const bool ours = copies_.capture() == 0 || isCapturing(via_.computeStream(device));
  c10::Storage host =
      ours ? spill_.hostMemory(nbytes, device, HostUser::OutStream) : c10::Storage();
  if (!host) {
    context_.stats.bytesRefused += nbytes;
    account->refused += nbytes;
    return {};
  }
  auto stash = c10::make_intrusive<HostStash>(
      shared_from_this(), storage, nbytes, account, via_.computeStream(device));
  via_.packed(storage);
  stash->onHost = std::move(host);
  stash->sent.sequence = ++lastSequence_;
  stash->sent.stretch = stretches_.current();
  copies_.send(*stash);
  if (stretches_.add(nbytes)) {
    stretches_.end();
    copies_.stretchEnds();
  }
  return stash;
}

// The calling thread may hold the lock: the engine allocates only while its lists are complete.
bool Offload::giveBack(c10::Device device) {
  DroppingMutex& mutex = context_.shared.mutex;
  if (!mutex.try_lock()) {
    return false;
  }
  const auto unlock = c10::make_scope_exit([&] {
    mutex.unlockAndDropOnly(
        [&](const c10::Storage& storage) { return mayBeGivenBack(storage, device); });
  });
  return copies_.joinAll();
}

c10::Storage Offload::fetch(HostStash& stash, const c10::Storage& living) {
  const Lock lock(context_.shared.mutex);
  enter(stash.device());
  const c10::Stream compute = via_.computeStream(stash.device());
  if (stash.state() == State::Back) {
    copies_.handOver(stash, compute);
    return stash.onDevice;
  }
  if (stash.sent.capture != 0) {
    checkPlace(stash);
  }
  if (stretches_.moveTo(stash.sent.stretch)) {
    copies_.backwardMovesOn();
  }
  if (living) {
    takeLiving(stash, living);
  } else {
    bringBack(stash, compute);
  }
  takeBack(stash, compute);
  c10::Storage bytes = stash.onDevice;
  fetchAhead(stash);
  reap();
  return bytes;
}

// Perhaps called during error handling, as forget().
void Offload::regionEnds() {
  const Lock lock(context_.shared.mutex);
  try {
    copies_.noticeCapture();
    if (stretches_.end()) {
      copies_.stretchEnds();
    }
  } catch (const c10::Error&) {
  }
}

// Raises unless the stash was sent in the current capture or, without a capture, outside of all
// captures. A captured copy to the host runs only when the CUDA graph is launched; any other copy
// has run before the launch.
void Offload::checkPlace(const HostStash& stash) const {
  TORCH_CHECK(
      copies_.isHere(stash), "ebb: cannot restore ", stash.account->of, ": it was offloaded ",
      stash.sent.capture == 0 ? "before this CUDA graph capture and is needed inside it"
                              : "inside a CUDA graph capture and is needed outside of it",
      ", where nothing can wait for the copy. Capture forward and backward together, or give its "
      "operator the decision SAVE.");
}

void Offload::takeLiving(HostStash& stash, const c10::Storage& living) {
  spill_.settle(stash);
  if (stash.state() == State::Returning) {
    copies_.dropReturning(stash);
  }
  context_.drop(stash.onDevice);
  stash.onDevice = living;
}

void Offload::bringBack(HostStash& stash, c10::Stream compute) {
  const bool onDevice = stash.state() == State::NotSent || stash.state() == State::Leaving;
  if (!onDevice) {
    checkPlace(stash);
  }
  TORCH_CHECK(
      onDevice ? stash.hasWhatWasSent() : !stash.lost, "ebb: cannot restore ", stash.account->of,
      ": its storage was freed or resized while it was being copied to the host. Free it after "
      "backward, or give its operator the decision SAVE.");
  if (onDevice) {
    return;
  }
  if (stash.state() != State::Returning) {
    spill_.bringToHost(stash);
    ++context_.stats.fetchedLate;
    copies_.startReturning(stash);
  }
  copies_.takeReturning(stash, compute);
}

void Offload::takeBack(HostStash& stash, c10::Stream compute) {
  notAheadAnyMore(stash);
  context_.takeOut(stash);
  copies_.fetched(stash);
  stash.disk.room = c10::Storage();
  stash.back.stream = compute;
}

void Offload::beforeWrite(HostStash& stash) {
  const Lock lock(context_.shared.mutex);
  if (stash.state() == State::NotSent || stash.state() == State::Leaving) {
    copies_.noticeCapture(stash.device());
    checkPlace(stash);
    copies_.beforeWrite(stash);
  }
}

// Starts copies back of values that backward needs after `stash`. Backward needs values in reverse
// order, so the next value is the one sent before `stash` from the same stream. The copies are made
// for the current stream, which need not be backward's stream. If device memory is short, values
// are fetched when needed, and prefetching stops until the next forward, since each failed
// allocation empties the allocator's cache.
void Offload::fetchAhead(const HostStash& stash) {
  const size_t most = std::min(context_.settings.prefetchBytes, stretches_.bytesOfTwo());
  uint64_t sequence = stash.sent.sequence;
  HostStash* next = nullptr;
  while (triesAhead_ && (next = lastBefore(sequence)) != nullptr) {
    sequence = next->sent.sequence;
    if (aheadBytes_ + next->sent.nbytes > most) {
      return;
    }
    const HostStashPtr alive = ifAlive(next);
    if (!alive || !copies_.isHere(*next)) {
      continue;
    }
    if (next->state() == State::Spilled) {
      if (!spill_.readAhead(*next)) {
        return;
      }
    } else if (next->sent.stream == stash.sent.stream && !next->lost) {
      try {
        copies_.startReturning(*next);
      } catch (const c10::OutOfMemoryError&) {
        triesAhead_ = false;
        return;
      }
      next->back.ahead = true;
      aheadBytes_ += next->sent.nbytes;
    }
  }
}

// The latest stash sent before `sequence` that is on the host or on disk; null if there is none.
HostStash* Offload::lastBefore(uint64_t sequence) const {
  const auto lastIn = [&](const StashesInOrder& stashes) {
    const auto after = stashes.lower_bound(sequence);
    return after == stashes.begin() ? nullptr : std::prev(after)->second;
  };
  HostStash* onHost = lastIn(context_.away);
  HostStash* onDisk = lastIn(context_.spilled);
  const bool hostIsLater =
      onDisk == nullptr || (onHost != nullptr && onHost->sent.sequence > onDisk->sent.sequence);
  return hostIsLater ? onHost : onDisk;
}

// Subtracts the stash's bytes from the prefetched bytes, if the stash was prefetched.
void Offload::notAheadAnyMore(HostStash& stash) {
  if (std::exchange(stash.back.ahead, false)) {
    aheadBytes_ -= stash.sent.nbytes;
  }
}

// A dying stash is in no list of copies to or from disk, since those lists hold references. Called
// by destructors, perhaps during error handling, so exceptions are swallowed: a device error is
// raised again by the next call.
void Offload::forget(HostStash& stash) {
  const Lock lock(context_.shared.mutex);
  notAheadAnyMore(stash);
  context_.takeOut(stash);
  context_.drop(stash.disk.room);
  copies_.noticeCapture(stash.device());
  copies_.forget(stash);
  try {
    reap();
  } catch (const c10::Error&) {
  }
}

// Called before a value is sent or fetched. Notices a capture, and handles copies that are done.
void Offload::enter(c10::Device device) {
  copies_.noticeCapture(device);
  reap();
}

// Handles copies from and to disk that are done. Once no value is away, the compute streams wait
// for all copies: nothing is left to overlap with them, and a capture that ends now demands that
// all streams have joined the compute stream.
void Offload::reap() {
  copies_.reap();
  spill_.reap();
  if (copies_.unfetchedHere() == 0) {
    stretches_.stepIsOver();
    if (!via_.isDisk()) {
      copies_.joinAll();
    }
  }
}

void Offload::drain() {
  const Lock lock(context_.shared.mutex);
  spill_.finishAll();
  copies_.joinAll();
  spill_.reap();
  context_.host.trim();
}

OffloadStats Offload::stats() {
  const Lock lock(context_.shared.mutex);
  copies_.noticeCapture();
  reap();
  OffloadStats now = context_.stats;
  if (!via_.isDisk()) {
    now.hostBytesHeld = context_.host.held();
    now.hostBytesUsed = context_.host.used();
  }
  now.inFlightBytes = copies_.leavingBytes();
  now.stashes = copies_.unfetched();
  now.diskBytesUsed = Disk::get().used();
  return now;
}

// Creates the engine at the first send or query, not at import: querying the accelerator
// initialises it, and the program may want to do so later, in a child process.
Offload& offloadEngine() {
  if (const auto& instead = OffloadShared::get().instead) {
    return *instead;
  }
  if (acceleratorIsThere()) {
    static Offload& accelerated = leaked(acceleratorTransfer());
    return accelerated;
  }
  static Offload& toDisk = leaked(diskTransfer());
  return toDisk;
}

void putEngineInPlace(std::shared_ptr<Offload> instead) {
  offloadEngine().drain();
  OffloadShared& shared = OffloadShared::get();
  const Lock lock(shared.mutex);
  shared.instead = std::move(instead);
}

void setOffloadOptOut(bool (*optedOut)(const at::Tensor&)) {
  OffloadShared::get().optedOut = optedOut;
}

void configureOffload(const OffloadSettings& settings) {
  if (!settings.disk.empty()) {
    useCountingAllocator();
  }
  OffloadShared& shared = OffloadShared::get();
  const Lock lock(shared.mutex);
  Disk::get().configure(settings.disk, settings.diskLimit);
  shared.settings = settings;
  shared.warnedOfFailure = false;
}

OffloadSettings offloadSettings() {
  OffloadShared& shared = OffloadShared::get();
  const Lock lock(shared.mutex);
  return shared.settings;
}

OffloadStats offloadStats() {
  const bool hasEngine = isMade.load() || OffloadShared::get().instead != nullptr;
  return hasEngine ? offloadEngine().stats() : OffloadStats{};
}

}  // namespace ebb
