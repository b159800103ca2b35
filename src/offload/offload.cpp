#include "offload/offload.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "support/python_mutex.h"
#include "transfer/disk.h"

namespace ebb {

// What all engines share.
struct Offload::Shared {
  PythonMutex mutex;         // guards all engines; see Note [Locks and the GIL]
  OffloadSettings settings;  // from configure()
  OffloadStats stats;        // counts
  bool (*optedOut)(const at::Tensor&) = nullptr;
  std::shared_ptr<Offload> instead;  // of the usual one, if a test has put one in place
  Offload* toDisk = nullptr;         // the engine without an accelerator, once it was asked for
  bool toldOfFailure = false;        // under these settings, that a copy to the host or disk failed
  size_t depth = 0;                  // how often the lock is held
  std::vector<c10::Storage> dropped;  // see Note [Nothing dies under the engine's lock]
};

Offload::Shared& Offload::shared() {
  // Leaked on purpose, as engines are: handles may outlive static objects.
  static auto* instance = new Shared;
  return *instance;
}

Stash::Stash(
    std::shared_ptr<Offload> engine,
    c10::Storage bytes,
    size_t nbytes,
    TransferAccountPtr account,
    c10::Stream stream)
    : engine_(std::move(engine)),
      nbytes_(nbytes),
      device_(bytes.device()),
      packedOn_(stream),
      account_(std::move(account)),
      onDevice_(std::move(bytes)),
      address_(onDevice_.data()) {
}

Stash::~Stash() {
  engine_->forget(*this);
}

c10::Storage Stash::fetch(const c10::Storage& living) {
  return engine_->fetch(*this, living);
}

void Stash::beforeWrite() {
  engine_->beforeWrite(*this);
}

Offload::Offload(std::shared_ptr<Transfer> via)
    : owned_(std::move(via)),
      via_(*owned_),
      settings_(shared().settings),
      stats_(shared().stats),
      pool_(via_),
      process_(::getpid()) {
}

// Not before something is sent or asked: asking for the accelerator starts it, which a program may
// do later, in a child.
Offload& Offload::get() {
  const auto leaked = [](Transfer& via) {
    const std::shared_ptr<Transfer> borrowed(&via, [](Transfer*) {});
    return *new std::shared_ptr<Offload>(std::make_shared<Offload>(borrowed));
  };
  if (shared().instead) {
    return *shared().instead;
  }
  if (acceleratorIsThere()) {
    static Offload& accelerated = *leaked(acceleratorTransfer());
    return accelerated;
  }
  static Offload& toDisk = *leaked(diskTransfer());
  shared().toDisk = &toDisk;
  return toDisk;
}

void Offload::putInPlace(std::shared_ptr<Offload> instead) {
  get().drain();
  const Lock lock;
  shared().instead = std::move(instead);
}

Offload::Lock::Lock() {
  shared().mutex.lock();
  ++shared().depth;
}

Offload::Lock::~Lock() {
  std::vector<c10::Storage> dropped;
  if (--shared().depth == 0) {
    dropped.swap(shared().dropped);
  }
  shared().mutex.unlock();
}

void Offload::drop(c10::Storage& storage) {
  if (storage) {
    shared().dropped.push_back(std::move(storage));
    storage = c10::Storage();
  }
}

void Offload::configure(const OffloadSettings& settings) {
  const Lock lock;
  Disk::get().configure(settings.disk, settings.diskLimit);
  if (shared().toDisk != nullptr) {
    shared().toDisk->pool_.trim();  // it may be room in the old file
  }
  shared().settings = settings;
  shared().toldOfFailure = false;
}

OffloadSettings Offload::settings() {
  const Lock lock;
  return shared().settings;
}

void Offload::setOptOut(bool (*optedOut)(const at::Tensor&)) {
  shared().optedOut = optedOut;
}

bool Offload::takes(const at::Tensor& tensor) {
  {
    const Lock lock;
    if (tensor.storage().nbytes() < std::max<size_t>(settings_.minBytes, 1)) {
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
  const auto optedOut = shared().optedOut;
  return aligned && (optedOut == nullptr || !optedOut(tensor));
}

StashPtr Offload::send(
    const c10::Storage& storage, size_t nbytes, const TransferAccountPtr& account) {
  const Lock lock;
  reap();
  const c10::Device device = storage.device();
  c10::Storage host = hostMemory(nbytes, device);
  if (!host) {
    stats_.bytesRefused += nbytes;
    account->refused += nbytes;
    return {};
  }
  auto stash = c10::make_intrusive<Stash>(
      shared_from_this(), storage, nbytes, account, via_.computeStream(device));
  via_.packed(storage);
  stash->onHost_ = std::move(host);
  stash->sequence_ = ++lastSequence_;
  ++count_;
  kept_.push_back(stash.get());
  while (kept_.size() > settings_.keepLast) {
    const StashPtr first = ifAlive(kept_.front());
    kept_.pop_front();
    if (first) {
      startLeaving(first);
    }
  }
  return stash;
}

c10::Storage Offload::fetch(Stash& stash, const c10::Storage& living) {
  const Lock lock;
  reap();
  using State = Stash::State;
  if (stash.state_ == State::Back) {
    return stash.onDevice_;
  }
  const c10::Stream compute = via_.computeStream(stash.device_);
  const bool onDevice = stash.state_ == State::Kept || stash.state_ == State::Leaving;
  TORCH_CHECK(
      living || (onDevice ? stash.hasWhatWasSent() : !stash.lost_),
      "ebb: cannot bring back ",
      stash.account_->of,
      ": its storage was freed or resized while it was being copied to the host. Free it after "
      "backward, or give its operator the decision SAVE.");
  if (living) {
    settleDisk(stash);
    if (stash.state_ == State::Returning) {
      held_.push_back({stash.returned_, stash.packedOn_, std::move(stash.onDevice_), {}});
    }
    drop(stash.onDevice_);
    stash.onDevice_ = living;
  } else if (!onDevice) {
    if (stash.state_ != State::Returning) {
      bringToHost(stash);
      ++stats_.fetchedLate;
      startReturning(StashPtr::reclaim_copy(&stash));
    }
    takeReturning(stash, compute);
  }
  notAhead(stash);
  keepNoMore(stash);
  list(stash, nullptr);
  if (stash.state_ == State::Kept || stash.state_ == State::Away) {
    giveHostMemory(stash);  // else reap() does, when the copy is done
  }
  stash.onDisk_ = c10::Storage();
  stash.state_ = State::Back;
  --count_;
  c10::Storage bytes = stash.onDevice_;
  try {
    fetchAhead(stash.sequence_, compute);
  } catch (const c10::Error&) {
    // The device has no memory for what is not needed yet: it is fetched when it is.
  }
  if (settings_.isStatic && count_ == 0) {
    joinAll();
  }
  return bytes;
}

void Offload::beforeWrite(Stash& stash) {
  const Lock lock;
  if (stash.state_ == Stash::State::Kept) {
    keepNoMore(stash);
    startLeaving(StashPtr::reclaim_copy(&stash));
  }
  if (stash.state_ == Stash::State::Leaving) {
    via_.wait(via_.computeStream(stash.device_), stash.left_);
    remove(leaving_, stash);
    leavingBytes_ -= stash.nbytes_;
    if (!stash.left_->error().empty()) {
      keepCopy(stash);
      return;
    }
    held_.push_back({stash.left_, stash.packedOn_, std::move(stash.onDevice_), {}});
    stash.state_ = Stash::State::Away;
    list(stash, &away_);
  }
}

// It could not leave, and its storage is about to be written.
void Offload::keepCopy(Stash& stash) {
  stayed(stash);
  c10::Storage copy = via_.allocateOnDevice(stash.nbytes_, stash.device_);
  std::memcpy(copy.mutable_data(), stash.onDevice_.data(), stash.nbytes_);
  drop(stash.onDevice_);
  stash.address_ = copy.data();
  stash.onDevice_ = std::move(copy);
}

// A disk that fails does so for every tensor, so it is told of once.
void Offload::warnOfFailure(const Stash& stash, const char* remains, const std::string& error) {
  if (!std::exchange(shared().toldOfFailure, true)) {
    TORCH_WARN("ebb: ", stash.account_->of, remains, error, " (Other tensors too; shown once.)");
  }
}

// Its copy to the host failed.
void Offload::stayed(Stash& stash) {
  warnOfFailure(stash, ", stays in memory: ", stash.left_->error());
  stash.state_ = Stash::State::Kept;
}

void Offload::keepNoMore(Stash& stash) {
  const auto place = std::find(kept_.begin(), kept_.end(), &stash);
  if (place != kept_.end()) {
    kept_.erase(place);
  }
}

void Offload::notAhead(Stash& stash) {
  if (std::exchange(stash.ahead_, false)) {
    aheadBytes_ -= stash.nbytes_;
  }
}

// A copy to it may be under way still, if a write to the storage made it Away early.
void Offload::giveHostMemory(Stash& stash) {
  const bool busy = stash.left_ && (settings_.isStatic || !via_.isDone(*stash.left_));
  if (busy) {
    held_.push_back({stash.left_, stash.packedOn_, {}, std::move(stash.onHost_)});
  } else {
    pool_.give(std::move(stash.onHost_));
  }
}

// Whether `stash`, to which the caller has a reference, was in `queue`.
bool Offload::remove(std::deque<StashPtr>& queue, Stash& stash) {
  const auto place = std::find(queue.begin(), queue.end(), StashPtr::reclaim_copy(&stash));
  const bool found = place != queue.end();
  if (found) {
    queue.erase(place);
  }
  return found;
}

StashPtr Offload::ifAlive(Stash* listed) {
  auto weak = c10::weak_intrusive_ptr<Stash>::reclaim(listed);
  StashPtr stash = weak.lock();
  weak.release();
  return stash;
}

// Nobody will ask for it. Lists of copies that are under way hold references, so it is in none.
void Offload::forget(Stash& stash) {
  const Lock lock;
  keepNoMore(stash);
  notAhead(stash);
  list(stash, nullptr);
  if (stash.state_ != Stash::State::Back) {
    --count_;
  }
  if (stash.onHost_) {
    giveHostMemory(stash);
  }
  drop(stash.onDisk_);
  drop(stash.onDevice_);
}

void Offload::drain() {
  const Lock lock;
  for (const StashPtr& stash : leaving_) {
    via_.finish(*stash->left_);
  }
  for (const StashPtr& stash : returning_) {
    via_.finish(*stash->returned_);
  }
  for (const Held& held : held_) {
    via_.finish(*held.until);
  }
  for (const StashPtr& stash : spilling_) {
    asDiskEvent(*stash->written_).wait();
  }
  for (const StashPtr& stash : reading_) {
    asDiskEvent(*stash->read_).wait();
  }
  reapDone();
  pool_.trim();
}

OffloadStats Offload::stats() {
  const Lock lock;
  reap();
  OffloadStats now = stats_;
  if (!via_.isDisk()) {
    now.hostBytesHeld = pool_.held();
    now.hostBytesUsed = pool_.used();
  }
  now.inFlightBytes = leavingBytes_;
  now.stashes = count_;
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
