#include "residency/offload.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "residency/disk.h"

namespace ebb {

Stash::Stash(c10::Storage bytes, size_t nbytes, TransferAccountPtr account, c10::Stream stream)
    : nbytes_(nbytes),
      device_(bytes.device()),
      packedOn_(stream),
      account_(std::move(account)),
      onDevice_(std::move(bytes)),
      address_(onDevice_.data()) {
}

Stash::~Stash() {
  Offload::get().forget(*this);
}

c10::Storage Stash::fetch(const c10::Storage& living) {
  return Offload::get().fetch(*this, living);
}

void Stash::beforeWrite() {
  Offload::get().beforeWrite(*this);
}

Offload& Offload::get() {
  // Leaked on purpose: handles may outlive static objects.
  static auto* instance = new Offload;
  return *instance;
}

Offload::Offload() : process_(::getpid()) {
}

Offload::Lock::Lock(Offload& engine) : engine_(engine) {
  engine_.mutex_.lock();
  ++engine_.depth_;
}

Offload::Lock::~Lock() {
  std::vector<c10::Storage> dropped;
  if (--engine_.depth_ == 0) {
    dropped.swap(engine_.dropped_);
  }
  engine_.mutex_.unlock();
}

void Offload::drop(c10::Storage& storage) {
  if (storage) {
    dropped_.push_back(std::move(storage));
    storage = c10::Storage();
  }
}

void Offload::configure(const OffloadSettings& settings) {
  const Lock lock(*this);
  Disk::get().configure(settings.disk, settings.diskLimit);
  if (pool_.held() > 0 && &transfer() == &diskTransfer()) {
    pool_.trim();  // it may be room in the old file
  }
  settings_ = settings;
}

OffloadSettings Offload::settings() {
  const Lock lock(*this);
  return settings_;
}

void Offload::setOptOut(bool (*optedOut)(const at::Tensor&)) {
  optedOut_ = optedOut;
}

bool Offload::takes(const at::Tensor& tensor) {
  {
    const Lock lock(*this);
    if (tensor.storage().nbytes() < std::max<size_t>(settings_.minBytes, 1)) {
      return false;
    }
  }
  if (!transfer().isDevice(tensor.device())) {
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
  return aligned && (optedOut_ == nullptr || !optedOut_(tensor));
}

StashPtr Offload::send(
    const c10::Storage& storage, size_t nbytes, const TransferAccountPtr& account) {
  const Lock lock(*this);
  reap();
  const c10::Device device = storage.device();
  c10::Storage host = hostMemory(nbytes, device);
  if (!host) {
    stats_.bytesRefused += nbytes;
    account->refused += nbytes;
    return {};
  }
  auto stash =
      c10::make_intrusive<Stash>(storage, nbytes, account, transfer().computeStream(device));
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
  const Lock lock(*this);
  reap();
  using State = Stash::State;
  if (stash.state_ == State::Back) {
    return stash.onDevice_;
  }
  const c10::Stream compute = transfer().computeStream(stash.device_);
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
  const Lock lock(*this);
  if (stash.state_ == Stash::State::Kept) {
    keepNoMore(stash);
    startLeaving(StashPtr::reclaim_copy(&stash));
  }
  if (stash.state_ == Stash::State::Leaving) {
    transfer().wait(transfer().computeStream(stash.device_), stash.left_);
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
  c10::Storage copy = transfer().allocateOnDevice(stash.nbytes_, stash.device_);
  std::memcpy(copy.mutable_data(), stash.onDevice_.data(), stash.nbytes_);
  drop(stash.onDevice_);
  stash.address_ = copy.data();
  stash.onDevice_ = std::move(copy);
}

// Its copy to the host failed.
void Offload::stayed(Stash& stash) {
  TORCH_WARN("ebb: ", stash.account_->of, ", stays in memory: ", stash.left_->error());
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
  const bool busy = stash.left_ && (settings_.isStatic || !transfer().isDone(*stash.left_));
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
  const Lock lock(*this);
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
  const Lock lock(*this);
  for (const StashPtr& stash : leaving_) {
    transfer().finish(*stash->left_);
  }
  for (const StashPtr& stash : returning_) {
    transfer().finish(*stash->returned_);
  }
  for (const Held& held : held_) {
    transfer().finish(*held.until);
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
  const Lock lock(*this);
  reap();
  OffloadStats now = stats_;
  if (&transfer() != &diskTransfer()) {
    now.hostBytesHeld = pool_.held();
    now.hostBytesUsed = pool_.used();
  }
  now.inFlightBytes = leavingBytes_;
  now.stashes = count_;
  now.diskBytesUsed = Disk::get().used();
  return now;
}

void configureOffload(const OffloadSettings& settings) {
  Offload::get().configure(settings);
}

OffloadSettings offloadSettings() {
  return Offload::get().settings();
}

OffloadStats offloadStats() {
  return Offload::get().stats();
}

}  // namespace ebb
