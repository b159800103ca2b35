#include "offload/copies.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ebb {
namespace {

using State = HostStash::State;

}  // namespace

void Copies::startLeaving(const HostStashPtr& stash) {
  const size_t most = context_.settings.inFlightBytes;
  while (!leaving_.empty() && leavingBytes_ + stash->nbytes > most) {
    waitForFirst();
  }
  const c10::Stream out = via_.outStream(stash->device);
  via_.wait(out, via_.record(stash->packedOn));
  via_.copy(stash->onHost, stash->onDevice, stash->nbytes, out);
  stash->left = via_.record(out);
  stash->state = State::Leaving;
  leaving_.push_back(stash);
  leavingBytes_ += stash->nbytes;
  OffloadStats& stats = context_.stats;
  stats.bytesSent += stash->nbytes;
  stats.mostInFlight = std::max(stats.mostInFlight, leavingBytes_);
  stash->account->sent += stash->nbytes;
  while (leavingBytes_ > most) {  // it alone is more than the limit
    waitForFirst();
  }
}

// For the copy to the host that was started first.
void Copies::waitForFirst() {
  const HostStashPtr first = leaving_.front();
  if (context_.settings.isStatic) {
    via_.wait(first->packedOn, first->left);
    first->account->waitedByDevice += first->nbytes;
    firstHasLeft();
  } else {
    ++context_.stats.hostWaits;
    first->account->waitedByHost += first->nbytes;
    via_.finish(*first->left);
    reap();
  }
}

// The first copy to the host is done, or what follows on the compute stream waits for it.
void Copies::firstHasLeft() {
  const HostStashPtr stash = std::move(leaving_.front());
  leaving_.pop_front();
  leavingBytes_ -= stash->nbytes;
  if (stash->state != State::Leaving) {
    context_.pool.give(std::move(stash->onHost));  // it was fetched meanwhile
    return;
  }
  if (!stash->left->error().empty()) {
    stays(*stash);
    return;
  }
  stash->lost = !stash->hasWhatWasSent();
  stash->state = State::Away;
  context_.drop(stash->onDevice);
  context_.away.add(*stash);
}

void Copies::finishLeaving(HostStash& stash) {
  via_.wait(via_.computeStream(stash.device), stash.left);
  takeOut(leaving_, stash);
  leavingBytes_ -= stash.nbytes;
  if (!stash.left->error().empty()) {
    stays(stash);
    moveToCopy(stash);
    return;
  }
  held_.push_back({stash.left, stash.packedOn, std::move(stash.onDevice), {}});
  stash.state = State::Away;
  context_.away.add(stash);
}

// Its copy to the host failed.
void Copies::stays(HostStash& stash) {
  context_.warnOfFailure(stash, ", stays in memory: ", stash.left->error());
  stash.state = State::Kept;
}

// Its storage is about to be written, and it could not leave.
void Copies::moveToCopy(HostStash& stash) {
  c10::Storage copy = via_.allocateOnDevice(stash.nbytes, stash.device);
  std::memcpy(copy.mutable_data(), stash.onDevice.data(), stash.nbytes);
  context_.drop(stash.onDevice);
  stash.address = copy.data();
  stash.onDevice = std::move(copy);
}

void Copies::startReturning(const HostStashPtr& stash) {
  stash->onDevice = via_.allocateOnDevice(stash->nbytes, stash->device);
  const c10::Stream in = via_.inStream(stash->device);
  via_.wait(in, via_.record(via_.computeStream(stash->device)));
  via_.wait(in, stash->left);
  via_.copy(stash->onDevice, stash->onHost, stash->nbytes, in);
  stash->returned = via_.record(in);
  stash->state = State::Returning;
  StashesInOrder::takeOut(*stash);
  returning_.push_back(stash);
  context_.stats.bytesFetched += stash->nbytes;
  stash->account->fetched += stash->nbytes;
}

void Copies::takeReturning(HostStash& stash, c10::Stream compute) {
  const bool isStatic = context_.settings.isStatic;
  if (stash.ahead && stash.packedOn != compute) {
    moveToStream(stash, compute);
  }
  if (!stash.ahead || (!isStatic && !via_.isDone(*stash.returned))) {
    stash.account->waitedByDevice += stash.nbytes;
  }
  via_.wait(compute, stash.returned);
  stash.checkCameBack(*stash.returned);
  // If it is not there, it was known to be done before the mode was static.
  if (isStatic && takeOut(returning_, stash)) {
    via_.wait(via_.outStream(stash.device), stash.returned);
    context_.pool.give(std::move(stash.onHost));
  }
}

// What was fetched ahead belongs to the stream it was packed on, where its memory may be used again
// while `compute` still reads it. So `compute` gets a copy in memory of its own.
void Copies::moveToStream(HostStash& stash, c10::Stream compute) {
  const c10::Stream in = via_.inStream(stash.device);
  c10::Storage here = via_.allocateOnDevice(stash.nbytes, stash.device);
  via_.wait(in, via_.record(compute));
  via_.copy(here, stash.onDevice, stash.nbytes, in);
  const EventPtr moved = via_.record(in);
  held_.push_back({moved, stash.packedOn, std::exchange(stash.onDevice, std::move(here)), {}});
  via_.wait(compute, moved);
}

void Copies::giveDeviceMemory(HostStash& stash) {
  held_.push_back({stash.returned, stash.packedOn, std::move(stash.onDevice), {}});
}

// A copy to it may be under way still, if a write to the storage made it Away early.
void Copies::giveHostMemory(HostStash& stash) {
  const bool busy = stash.left && (context_.settings.isStatic || !via_.isDone(*stash.left));
  if (busy) {
    held_.push_back({stash.left, stash.packedOn, {}, std::move(stash.onHost)});
  } else {
    context_.pool.give(std::move(stash.onHost));
  }
}

void Copies::reap() {
  const auto done = [this](const auto& list, const auto& event) {
    return !list.empty() && via_.isDone(*event(list.front()));
  };
  while (done(leaving_, [](const HostStashPtr& stash) -> const EventPtr& { return stash->left; })) {
    firstHasLeft();
  }
  while (done(
      returning_, [](const HostStashPtr& stash) -> const EventPtr& { return stash->returned; })) {
    firstHasReturned();
  }
  while (done(held_, [](const Held& held) -> const EventPtr& { return held.until; })) {
    releaseFirstHeld();
  }
}

void Copies::firstHasReturned() {
  const HostStashPtr stash = std::move(returning_.front());
  returning_.pop_front();
  context_.pool.give(std::move(stash->onHost));
}

void Copies::releaseFirstHeld() {
  Held held = std::move(held_.front());
  held_.pop_front();
  context_.drop(held.onDevice);
  if (held.onHost) {
    context_.pool.give(std::move(held.onHost));
  }
}

void Copies::reapUnused() {
  const auto unused = [](const HostStashPtr& stash) { return stash.use_count() == 1; };
  while (!leaving_.empty() && unused(leaving_.front())) {
    waitForFirst();
  }
  const size_t unusedReturning =
      std::count_if(returning_.begin(), returning_.end(), [&](const HostStashPtr& stash) {
        return unused(stash) && stash->state == State::Returning;
      });
  const bool used = context_.unfetched > unusedReturning;
  if (!used) {
    joinAll();
  }
}

void Copies::joinAll() {
  while (!leaving_.empty()) {
    waitForFirst();
  }
  while (!returning_.empty()) {
    const HostStash& first = *returning_.front();
    via_.wait(first.packedOn, first.returned);
    via_.wait(via_.outStream(first.device), first.returned);
    firstHasReturned();
  }
  while (!held_.empty()) {
    via_.wait(held_.front().stream, held_.front().until);
    releaseFirstHeld();
  }
}

void Copies::finishAll() {
  for (const HostStashPtr& stash : leaving_) {
    via_.finish(*stash->left);
  }
  for (const HostStashPtr& stash : returning_) {
    via_.finish(*stash->returned);
  }
  for (const Held& held : held_) {
    via_.finish(*held.until);
  }
}

bool Copies::finishOne() {
  const EventPtr next = !returning_.empty() ? returning_.front()->returned
                        : !leaving_.empty() ? leaving_.front()->left
                        : !held_.empty()    ? held_.front().until
                                            : nullptr;
  if (next) {
    via_.finish(*next);
  }
  return next != nullptr;
}

}  // namespace ebb
