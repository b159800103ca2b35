#include "offload/offload.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "memory/dropping_mutex.h"
#include "transfer/disk.h"

namespace ebb {
namespace {

using Lock = std::lock_guard<DroppingMutex>;
using State = HostStash::State;

DroppingMutex& mutex() {
  return OffloadShared::get().mutex;
}

// Leaked on purpose: handles may outlive static objects.
struct Engines {
  std::shared_ptr<Offload> instead;  // of the usual one, if a test has put one in place
  Offload* toDisk = nullptr;         // the engine without an accelerator, once it was asked for
  bool (*optedOut)(const at::Tensor&) = nullptr;
};

Engines& engines() {
  static auto* instance = new Engines;
  return *instance;
}

Offload& leaked(Transfer& via) {
  const std::shared_ptr<Transfer> borrowed(&via, [](Transfer*) {});
  return **new std::shared_ptr<Offload>(std::make_shared<Offload>(borrowed));
}

}  // namespace

Offload::Offload(std::shared_ptr<Transfer> via)
    : owned_(std::move(via)), via_(*owned_), context_(via_), process_(::getpid()) {
}

// Not before something is sent or asked: asking for the accelerator starts it, which a program may
// do later, in a child.
Offload& Offload::get() {
  if (engines().instead) {
    return *engines().instead;
  }
  if (acceleratorIsThere()) {
    static Offload& accelerated = leaked(acceleratorTransfer());
    return accelerated;
  }
  static Offload& toDisk = leaked(diskTransfer());
  engines().toDisk = &toDisk;
  return toDisk;
}

void Offload::putInPlace(std::shared_ptr<Offload> instead) {
  get().drain();
  const Lock lock(mutex());
  engines().instead = std::move(instead);
}

void Offload::configure(const OffloadSettings& settings) {
  const Lock lock(mutex());
  Disk::get().configure(settings.disk, settings.diskLimit);
  if (engines().toDisk != nullptr) {
    engines().toDisk->context_.pool.trim();  // it may be room in the old file
  }
  OffloadShared& shared = OffloadShared::get();
  shared.settings = settings;
  shared.warnedOfFailure = false;
}

OffloadSettings Offload::settings() {
  const Lock lock(mutex());
  return OffloadShared::get().settings;
}

void Offload::setOptOut(bool (*optedOut)(const at::Tensor&)) {
  engines().optedOut = optedOut;
}

bool Offload::takes(const at::Tensor& tensor) {
  {
    const Lock lock(mutex());
    if (tensor.storage().nbytes() < std::max<size_t>(context_.settings.minBytes, 1)) {
      return false;
    }
  }
  if (!via_.isDevice(tensor.device())) {
    TORCH_WARN_ONCE(
        "ebb: OFFLOAD means SAVE for a tensor on ",
        tensor.device(),
        ": there is no accelerator that it could leave, and no disk tier "
        "(ebb.offload.configure(disk=...)). Shown once.");
    return false;
  }
  // See Note [Alignment]: what comes back is aligned.
  constexpr size_t kAlignment = 64;
  const bool aligned =
      !tensor.is_cpu() || reinterpret_cast<uintptr_t>(tensor.storage().data()) % kAlignment == 0;
  const auto optedOut = engines().optedOut;
  return aligned && (optedOut == nullptr || !optedOut(tensor));
}

HostStashPtr Offload::send(
    const c10::Storage& storage, size_t nbytes, const TransferAccountPtr& account) {
  const Lock lock(mutex());
  reap();
  const c10::Device device = storage.device();
  c10::Storage host = spill_.hostMemory(nbytes, device);
  if (!host) {
    context_.stats.bytesRefused += nbytes;
    account->refused += nbytes;
    return {};
  }
  auto stash = c10::make_intrusive<HostStash>(
      shared_from_this(), storage, nbytes, account, via_.computeStream(device));
  via_.packed(storage);
  stash->onHost = std::move(host);
  stash->sequence = ++lastSequence_;
  ++context_.unfetched;
  kept_.push_back(stash.get());
  while (kept_.size() > context_.settings.keepLast) {
    const HostStashPtr first = ifAlive(kept_.front());
    kept_.pop_front();
    if (first) {
      copies_.startLeaving(first);
    }
  }
  return stash;
}

c10::Storage Offload::fetch(HostStash& stash, const c10::Storage& living) {
  const Lock lock(mutex());
  reap();
  if (stash.state == State::Back) {
    return stash.onDevice;
  }
  const c10::Stream compute = via_.computeStream(stash.device);
  if (living) {
    takeLiving(stash, living);
  } else {
    bringBack(stash, compute);
  }
  takeBack(stash);
  c10::Storage bytes = stash.onDevice;
  try {
    fetchAhead(stash.sequence, compute);
  } catch (const c10::Error&) {
    // The device has no memory for what is not needed yet: it is fetched when it is.
  }
  if (context_.settings.isStatic && context_.unfetched == 0) {
    copies_.joinAll();
  }
  return bytes;
}

void Offload::takeLiving(HostStash& stash, const c10::Storage& living) {
  spill_.settle(stash);
  if (stash.state == State::Returning) {
    copies_.giveDeviceMemory(stash);
  }
  context_.drop(stash.onDevice);
  stash.onDevice = living;
}

void Offload::bringBack(HostStash& stash, c10::Stream compute) {
  const bool onDevice = stash.state == State::Kept || stash.state == State::Leaving;
  TORCH_CHECK(
      onDevice ? stash.hasWhatWasSent() : !stash.lost,
      "ebb: cannot bring back ",
      stash.account->of,
      ": its storage was freed or resized while it was being copied to the host. Free it after "
      "backward, or give its operator the decision SAVE.");
  if (onDevice) {
    return;
  }
  if (stash.state != State::Returning) {
    spill_.bringToHost(stash);
    ++context_.stats.fetchedLate;
    copies_.startReturning(HostStashPtr::reclaim_copy(&stash));
  }
  copies_.takeReturning(stash, compute);
}

void Offload::takeBack(HostStash& stash) {
  notAheadAnyMore(stash);
  keepNoMore(stash);
  StashesInOrder::takeOut(stash);
  if (stash.state == State::Kept || stash.state == State::Away) {
    copies_.giveHostMemory(stash);  // else reap() does, when the copy is done
  }
  stash.onDisk = c10::Storage();
  stash.state = State::Back;
  --context_.unfetched;
}

void Offload::beforeWrite(HostStash& stash) {
  const Lock lock(mutex());
  if (stash.state == State::Kept) {
    keepNoMore(stash);
    copies_.startLeaving(HostStashPtr::reclaim_copy(&stash));
  }
  if (stash.state == State::Leaving) {
    copies_.finishLeaving(stash);
  }
}

// Backward goes the other way: what was sent before is needed next.
void Offload::fetchAhead(uint64_t sequence, c10::Stream compute) {
  while (HostStash* next = lastBefore(sequence)) {
    sequence = next->sequence;
    if (aheadBytes_ + next->nbytes > context_.settings.prefetchBytes) {
      return;
    }
    const HostStashPtr alive = ifAlive(next);
    if (!alive) {
      continue;
    }
    if (next->state == State::Spilled) {
      if (!spill_.readAhead(*next)) {
        return;
      }
    } else if (next->packedOn == compute && !next->lost) {
      copies_.startReturning(alive);
      next->ahead = true;
      aheadBytes_ += next->nbytes;
    }
  }
}

// The latest of those sent before `sequence` that is on the host or on disk; null if none is.
HostStash* Offload::lastBefore(uint64_t sequence) const {
  HostStash* onHost = context_.away.lastBefore(sequence);
  HostStash* onDisk = context_.spilled.lastBefore(sequence);
  const bool hostIsLater =
      onDisk == nullptr || (onHost != nullptr && onHost->sequence > onDisk->sequence);
  return hostIsLater ? onHost : onDisk;
}

// It is not ahead of the need for it any more, if it was.
void Offload::notAheadAnyMore(HostStash& stash) {
  if (std::exchange(stash.ahead, false)) {
    aheadBytes_ -= stash.nbytes;
  }
}

void Offload::keepNoMore(HostStash& stash) {
  const auto place = std::find(kept_.begin(), kept_.end(), &stash);
  if (place != kept_.end()) {
    kept_.erase(place);
  }
}

// Lists of copies that are under way hold references, so it is in none.
void Offload::forget(HostStash& stash) {
  const Lock lock(mutex());
  keepNoMore(stash);
  notAheadAnyMore(stash);
  StashesInOrder::takeOut(stash);
  if (stash.state != State::Back) {
    --context_.unfetched;
  }
  if (stash.onHost) {
    copies_.giveHostMemory(stash);
  }
  context_.drop(stash.onDisk);
  context_.drop(stash.onDevice);
}

// Takes note of copies that are done.
void Offload::reap() {
  if (via_.isDisk() && process_ != ::getpid()) {
    process_ = ::getpid();
    context_.pool.trim();  // free room in the parent's file
  }
  if (context_.settings.isStatic) {
    copies_.reapUnused();  // see Note [Transfers in a CUDA graph]
  } else {
    copies_.reap();
    spill_.reap();
  }
}

void Offload::drain() {
  const Lock lock(mutex());
  copies_.finishAll();
  spill_.finishAll();
  copies_.reap();
  spill_.reap();
  context_.pool.trim();
}

OffloadStats Offload::stats() {
  const Lock lock(mutex());
  reap();
  OffloadStats now = context_.stats;
  if (!via_.isDisk()) {
    now.hostBytesHeld = context_.pool.held();
    now.hostBytesUsed = context_.pool.used();
  }
  now.inFlightBytes = copies_.leavingBytes();
  now.stashes = context_.unfetched;
  now.diskBytesUsed = Disk::get().used();
  return now;
}

void configureOffload(const OffloadSettings& settings) {
  Offload::configure(settings);
}

OffloadSettings offloadSettings() {
  return Offload::settings();
}

OffloadStats offloadStats() {
  return Offload::get().stats();
}

}  // namespace ebb
