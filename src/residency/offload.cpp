#include "residency/offload.h"

#include <algorithm>
#include <utility>

namespace ebb {

Stash::Stash(c10::Storage bytes, size_t nbytes, c10::Storage host, c10::Stream stream)
    : nbytes_(nbytes),
      device_(bytes.device()),
      packedOn_(stream),
      onDevice_(std::move(bytes)),
      address_(onDevice_.data()),
      onHost_(std::move(host)) {
}

Stash::~Stash() {
  Offload::get().forget(*this);
}

Offload& Offload::get() {
  // Leaked on purpose: handles may outlive static objects.
  static auto* instance = new Offload;
  return *instance;
}

Offload::Offload() {
  pool_.setLimit(settings_.pinnedLimit);
}

void Offload::configure(const OffloadSettings& settings) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  settings_ = settings;
  pool_.setLimit(settings.pinnedLimit);
}

OffloadSettings Offload::settings() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  return settings_;
}

void Offload::setOptOut(bool (*optedOut)(const at::Tensor&)) {
  optedOut_ = optedOut;
}

bool Offload::takes(const at::Tensor& tensor) {
  {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (tensor.storage().nbytes() < std::max<size_t>(settings_.minBytes, 1)) {
      return false;
    }
  }
  if (!transfer().isDevice(tensor.device())) {
    TORCH_WARN_ONCE(
        "ebb: OFFLOAD means SAVE for a tensor on ",
        tensor.device(),
        ": there is no accelerator that it could leave. Shown once.");
    return false;
  }
  return optedOut_ == nullptr || !optedOut_(tensor);
}

StashPtr Offload::send(const c10::Storage& storage, size_t nbytes) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  reap();
  const c10::Device device = storage.device();
  c10::Storage host = pool_.take(nbytes, device);
  if (!host) {
    stats_.bytesRefused += nbytes;
    return {};
  }
  auto stash = c10::make_intrusive<Stash>(
      storage, nbytes, std::move(host), transfer().computeStream(device));
  stash->at_ = order_.insert(order_.end(), stash.get());
  kept_.push_back(stash.get());
  while (kept_.size() > settings_.keepLast) {
    const auto first = StashPtr::reclaim_copy(kept_.front());
    kept_.pop_front();
    startLeaving(first);
  }
  return stash;
}

void Offload::startLeaving(const StashPtr& stash) {
  Transfer& via = transfer();
  while (!leaving_.empty() && leavingBytes_ + stash->nbytes_ > settings_.inFlightBytes) {
    ++stats_.hostWaits;
    via.finish(*leaving_.front()->left_);
    reap();
  }
  const c10::Stream out = via.outStream(stash->device_);
  via.wait(out, *via.record(via.computeStream(stash->device_)));
  via.copy(stash->onHost_, stash->onDevice_, stash->nbytes_, out);
  stash->left_ = via.record(out);
  stash->state_ = Stash::State::Leaving;
  leaving_.push_back(stash);
  leavingBytes_ += stash->nbytes_;
  stats_.bytesSent += stash->nbytes_;
  stats_.mostInFlight = std::max(stats_.mostInFlight, leavingBytes_);
  if (leavingBytes_ > settings_.inFlightBytes) {  // it alone is more than the limit
    ++stats_.hostWaits;
    via.finish(*stash->left_);
    reap();
  }
}

// Takes note of copies that are done.
void Offload::reap() {
  const auto done = [](const auto& list, const auto& event) {
    return !list.empty() && transfer().isDone(event(list.front()));
  };
  while (done(leaving_, [](const StashPtr& stash) -> const Event& { return *stash->left_; })) {
    const StashPtr stash = std::move(leaving_.front());
    leaving_.pop_front();
    leavingBytes_ -= stash->nbytes_;
    stash->lost_ = stash->state_ == Stash::State::Leaving && !stash->hasWhatWasSent();
    if (stash->state_ == Stash::State::Leaving) {
      stash->state_ = Stash::State::Away;
      stash->onDevice_ = c10::Storage();
    } else {
      pool_.give(std::move(stash->onHost_));  // it was fetched meanwhile
    }
  }
  while (
      done(returning_, [](const StashPtr& stash) -> const Event& { return *stash->returned_; })) {
    const StashPtr stash = std::move(returning_.front());
    returning_.pop_front();
    pool_.give(std::move(stash->onHost_));
  }
  while (done(held_, [](const Held& held) -> const Event& { return *held.until; })) {
    held_.pop_front();
  }
}

c10::Storage Offload::fetch(Stash& stash, const c10::Storage& living) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  reap();
  if (stash.state_ == Stash::State::Back) {
    return stash.onDevice_;
  }
  const c10::Stream compute = transfer().computeStream(stash.device_);
  const bool onDevice = stash.state_ == Stash::State::Kept || stash.state_ == Stash::State::Leaving;
  TORCH_CHECK(
      living || (onDevice ? stash.hasWhatWasSent() : !stash.lost_),
      "ebb: cannot bring back an offloaded tensor: its storage was freed or resized while it was "
      "being copied to the host. Free it after backward, or give its operator the decision SAVE.");
  if (living) {
    if (stash.state_ == Stash::State::Returning) {
      held_.push_back({stash.returned_, std::move(stash.onDevice_)});
      aheadBytes_ -= stash.nbytes_;
    }
    stash.onDevice_ = living;
  } else if (stash.state_ == Stash::State::Away) {
    ++stats_.fetchedLate;
    startReturning(StashPtr::reclaim_copy(&stash));
    transfer().wait(compute, *stash.returned_);
  } else if (stash.state_ == Stash::State::Returning) {
    aheadBytes_ -= stash.nbytes_;
    if (stash.packedOn_ != compute) {
      moveTo(stash, compute);
    }
    transfer().wait(compute, *stash.returned_);
  }
  if (stash.state_ == Stash::State::Kept) {
    keepNoMore(stash);
  }
  if (stash.state_ == Stash::State::Kept || stash.state_ == Stash::State::Away) {
    pool_.give(std::move(stash.onHost_));  // else reap() does, when the copy is done
  }
  stash.state_ = Stash::State::Back;
  const auto after = order_.erase(stash.at_);
  try {
    fetchAhead(after, compute);
  } catch (const c10::Error&) {
    // The device has no memory for what is not needed yet: it is fetched when it is.
  }
  return stash.onDevice_;
}

// What was fetched ahead belongs to the stream it was packed on, where its memory may be used again
// while `compute` still reads it. So `compute` gets a copy in memory of its own.
void Offload::moveTo(Stash& stash, c10::Stream compute) {
  Transfer& via = transfer();
  const c10::Stream in = via.inStream(stash.device_);
  c10::Storage here = via.allocateOnDevice(stash.nbytes_, stash.device_);
  via.wait(in, *via.record(compute));
  via.copy(here, stash.onDevice_, stash.nbytes_, in);
  const EventPtr moved = via.record(in);
  held_.push_back({moved, std::exchange(stash.onDevice_, std::move(here))});
  via.wait(compute, *moved);
}

void Offload::startReturning(const StashPtr& stash) {
  Transfer& via = transfer();
  stash->onDevice_ = via.allocateOnDevice(stash->nbytes_, stash->device_);
  const c10::Stream in = via.inStream(stash->device_);
  via.wait(in, *via.record(via.computeStream(stash->device_)));
  via.wait(in, *stash->left_);
  via.copy(stash->onDevice_, stash->onHost_, stash->nbytes_, in);
  stash->returned_ = via.record(in);
  stash->state_ = Stash::State::Returning;
  returning_.push_back(stash);
  stats_.bytesFetched += stash->nbytes_;
}

// Backward goes the other way: what was sent before is needed next.
void Offload::fetchAhead(std::list<Stash*>::iterator before, c10::Stream compute) {
  size_t window = 0;
  while (before != order_.begin()) {
    Stash& stash = **--before;
    window += stash.nbytes_;
    if (window > settings_.prefetchBytes || aheadBytes_ + stash.nbytes_ > settings_.prefetchBytes) {
      return;
    }
    if (stash.state_ == Stash::State::Away && stash.packedOn_ == compute && !stash.lost_) {
      startReturning(StashPtr::reclaim_copy(&stash));
      aheadBytes_ += stash.nbytes_;
    }
  }
}

void Offload::beforeWrite(Stash& stash) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (stash.state_ == Stash::State::Kept) {
    keepNoMore(stash);
    startLeaving(StashPtr::reclaim_copy(&stash));
  }
  if (stash.state_ == Stash::State::Leaving) {
    transfer().wait(transfer().computeStream(stash.device_), *stash.left_);
    const auto self = StashPtr::reclaim_copy(&stash);
    leaving_.erase(std::find(leaving_.begin(), leaving_.end(), self));
    leavingBytes_ -= stash.nbytes_;
    held_.push_back({stash.left_, std::move(stash.onDevice_)});
    stash.state_ = Stash::State::Away;
  }
}

void Offload::keepNoMore(Stash& stash) {
  const auto place = std::find(kept_.begin(), kept_.end(), &stash);
  if (place != kept_.end()) {
    kept_.erase(place);
  }
}

// Nobody will ask for it. No copy is under way: the lists of those hold references.
void Offload::forget(Stash& stash) {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (stash.state_ == Stash::State::Kept) {
    keepNoMore(stash);
  } else if (stash.state_ == Stash::State::Returning) {
    aheadBytes_ -= stash.nbytes_;
  }
  if (stash.state_ != Stash::State::Back) {
    order_.erase(stash.at_);
  }
  if (stash.onHost_) {
    pool_.give(std::move(stash.onHost_));
  }
  stash.onDevice_ = c10::Storage();
}

void Offload::drain() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (const auto* list : {&leaving_, &returning_}) {
    for (const StashPtr& stash : *list) {
      transfer().finish(*(list == &leaving_ ? stash->left_ : stash->returned_));
    }
  }
  for (const Held& held : held_) {
    transfer().finish(*held.until);
  }
  reap();
  pool_.trim();
}

OffloadStats Offload::stats() {
  std::lock_guard<std::recursive_mutex> lock(mutex_);
  reap();
  OffloadStats now = stats_;
  now.hostBytesHeld = pool_.held();
  now.hostBytesUsed = pool_.used();
  now.inFlightBytes = leavingBytes_;
  now.stashes = order_.size();
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
