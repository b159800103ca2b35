// The copies of the offload engine: see Note [The order of offloading].
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "offload/offload.h"
#include "transfer/disk.h"

namespace ebb {

void Offload::startLeaving(const StashPtr& stash) {
  while (!leaving_.empty() && leavingBytes_ + stash->nbytes_ > settings_.inFlightBytes) {
    waitForFirst();
  }
  const c10::Stream out = via_.outStream(stash->device_);
  via_.wait(out, via_.record(stash->packedOn_));
  via_.copy(stash->onHost_, stash->onDevice_, stash->nbytes_, out);
  stash->left_ = via_.record(out);
  stash->state_ = Stash::State::Leaving;
  leaving_.push_back(stash);
  leavingBytes_ += stash->nbytes_;
  stats_.bytesSent += stash->nbytes_;
  stats_.mostInFlight = std::max(stats_.mostInFlight, leavingBytes_);
  stash->account_->sent += stash->nbytes_;
  while (leavingBytes_ > settings_.inFlightBytes) {  // it alone is more than the limit
    waitForFirst();
  }
}

// For the copy to the host that was started first.
void Offload::waitForFirst() {
  const StashPtr first = leaving_.front();
  if (settings_.isStatic) {
    via_.wait(first->packedOn_, first->left_);
    first->account_->waitedByDevice += first->nbytes_;
    hasLeft();
  } else {
    ++stats_.hostWaits;
    first->account_->waitedByHost += first->nbytes_;
    via_.finish(*first->left_);
    reapDone();
  }
}

// The first copy to the host is done, or what follows on the compute stream waits for it.
void Offload::hasLeft() {
  const StashPtr stash = std::move(leaving_.front());
  leaving_.pop_front();
  leavingBytes_ -= stash->nbytes_;
  if (stash->state_ != Stash::State::Leaving) {
    pool_.give(std::move(stash->onHost_));  // it was fetched meanwhile
    return;
  }
  if (!stash->left_->error().empty()) {
    stayed(*stash);
    return;
  }
  stash->lost_ = !stash->hasWhatWasSent();
  stash->state_ = Stash::State::Away;
  drop(stash->onDevice_);
  list(*stash, &away_);
}

void Offload::startReturning(const StashPtr& stash) {
  stash->onDevice_ = via_.allocateOnDevice(stash->nbytes_, stash->device_);
  const c10::Stream in = via_.inStream(stash->device_);
  via_.wait(in, via_.record(via_.computeStream(stash->device_)));
  via_.wait(in, stash->left_);
  via_.copy(stash->onDevice_, stash->onHost_, stash->nbytes_, in);
  stash->returned_ = via_.record(in);
  stash->state_ = Stash::State::Returning;
  list(*stash, nullptr);
  returning_.push_back(stash);
  stats_.bytesFetched += stash->nbytes_;
  stash->account_->fetched += stash->nbytes_;
}

// `compute` may read what is being copied back.
void Offload::takeReturning(Stash& stash, c10::Stream compute) {
  if (stash.ahead_ && stash.packedOn_ != compute) {
    moveToStream(stash, compute);
  }
  if (!stash.ahead_ || (!settings_.isStatic && !via_.isDone(*stash.returned_))) {
    stash.account_->waitedByDevice += stash.nbytes_;
  }
  via_.wait(compute, stash.returned_);
  checkDone(stash, *stash.returned_);
  // If it is not there, it was known to be done before the mode was static.
  if (settings_.isStatic && remove(returning_, stash)) {
    via_.wait(via_.outStream(stash.device_), stash.returned_);
    pool_.give(std::move(stash.onHost_));
  }
}

// What was fetched ahead belongs to the stream it was packed on, where its memory may be used again
// while `compute` still reads it. So `compute` gets a copy in memory of its own.
void Offload::moveToStream(Stash& stash, c10::Stream compute) {
  const c10::Stream in = via_.inStream(stash.device_);
  c10::Storage here = via_.allocateOnDevice(stash.nbytes_, stash.device_);
  via_.wait(in, via_.record(compute));
  via_.copy(here, stash.onDevice_, stash.nbytes_, in);
  const EventPtr moved = via_.record(in);
  held_.push_back({moved, stash.packedOn_, std::exchange(stash.onDevice_, std::move(here)), {}});
  via_.wait(compute, moved);
}

// The latest of those sent before `sequence` that is on the host or on disk; null if none is.
Stash* Offload::lastBefore(uint64_t sequence) const {
  Stash* last = nullptr;
  for (const auto* list : {&away_, &spilled_}) {
    const auto after = list->lower_bound(sequence);
    if (after != list->begin()) {
      Stash* found = std::prev(after)->second;
      last = last == nullptr || found->sequence_ > last->sequence_ ? found : last;
    }
  }
  return last;
}

// Backward goes the other way: what was sent before is needed next.
void Offload::fetchAhead(uint64_t sequence, c10::Stream compute) {
  while (Stash* next = lastBefore(sequence)) {
    sequence = next->sequence_;
    if (aheadBytes_ + next->nbytes_ > settings_.prefetchBytes) {
      return;
    }
    const StashPtr alive = ifAlive(next);
    if (!alive) {
      continue;
    }
    if (next->state_ == Stash::State::Spilled) {
      c10::Storage memory = pool_.take(next->nbytes_, next->device_);
      if (!memory) {
        return;
      }
      startReading(*next, std::move(memory));
    } else if (next->packedOn_ == compute && !next->lost_) {
      startReturning(alive);
      next->ahead_ = true;
      aheadBytes_ += next->nbytes_;
    }
  }
}

void Offload::list(Stash& stash, Stash::BySequence* where) {
  if (stash.in_ == where) {
    return;
  }
  if (stash.in_ != nullptr) {
    stash.in_->erase(stash.at_);
  }
  stash.in_ = where;
  if (where != nullptr) {
    stash.at_ = where->emplace_hint(where->end(), stash.sequence_, &stash);
  }
}

void Offload::reap() {
  if (via_.isDisk() && process_ != ::getpid()) {
    process_ = ::getpid();
    pool_.trim();  // free room in the parent's file
  }
  if (settings_.isStatic) {
    reapUnused();
  } else {
    reapDone();
  }
}

// Takes note of copies that are done.
void Offload::reapDone() {
  const auto done = [this](const auto& list, const auto& event) {
    return !list.empty() && via_.isDone(event(list.front()));
  };
  while (done(leaving_, [](const StashPtr& stash) -> const Event& { return *stash->left_; })) {
    hasLeft();
  }
  while (
      done(returning_, [](const StashPtr& stash) -> const Event& { return *stash->returned_; })) {
    const StashPtr stash = std::move(returning_.front());
    returning_.pop_front();
    pool_.give(std::move(stash->onHost_));
  }
  while (done(held_, [](const Held& held) -> const Event& { return *held.until; })) {
    letGo();
  }
  reapDisk();
}

void Offload::letGo() {
  Held held = std::move(held_.front());
  held_.pop_front();
  drop(held.onDevice);
  if (held.onHost) {
    pool_.give(std::move(held.onHost));
  }
}

// See Note [Transfers in a CUDA graph]: nobody asks whether a copy is done, but of what nobody will
// fetch any more the compute stream waits for all.
void Offload::reapUnused() {
  const auto unused = [](const StashPtr& stash) { return stash.use_count() == 1; };
  while (!leaving_.empty() && unused(leaving_.front())) {
    waitForFirst();
  }
  const size_t unusedReturning =
      std::count_if(returning_.begin(), returning_.end(), [&](const StashPtr& stash) {
        return unused(stash) && stash->state_ == Stash::State::Returning;
      });
  const bool used = count_ > unusedReturning;
  if (!used) {
    joinAll();
  }
}

void Offload::joinAll() {
  while (!leaving_.empty()) {
    waitForFirst();
  }
  while (!returning_.empty()) {
    const StashPtr stash = std::move(returning_.front());
    returning_.pop_front();
    via_.wait(stash->packedOn_, stash->returned_);
    via_.wait(via_.outStream(stash->device_), stash->returned_);
    pool_.give(std::move(stash->onHost_));
  }
  while (!held_.empty()) {
    via_.wait(held_.front().stream, held_.front().until);
    letGo();
  }
}

}  // namespace ebb
