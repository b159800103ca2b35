// What the offload engine does when host memory is full: see Note [Spilling].
#include <algorithm>
#include <utility>

#include "offload/offload.h"
#include "transfer/disk.h"

namespace ebb {

// Host memory for what leaves the device; null if there is none and none can be made.
c10::Storage Offload::hostMemory(size_t nbytes, c10::Device device) {
  // Room on disk is limited by its file.
  pool_.setLimit(via_.isDisk() ? SIZE_MAX : settings_.pinnedLimit, settings_.isStatic);
  c10::Storage memory = pool_.take(nbytes, device);
  while (!memory && makeRoom(nbytes)) {
    memory = pool_.take(nbytes, device);
  }
  return memory;
}

// Waits until some host memory is free. False if there is nothing to wait for.
bool Offload::makeRoom(size_t nbytes) {
  const bool possible = Disk::get().isOpen() && !via_.isDisk() && !settings_.isStatic &&
                        nbytes <= settings_.pinnedLimit;
  if (!possible) {
    return false;
  }
  // A part of all, so that the next ones need not wait.
  const size_t wanted = std::max(nbytes, settings_.pinnedLimit / 8);
  size_t freeing = 0;
  for (const StashPtr& stash : spilling_) {
    freeing += stash->nbytes_;
  }
  while (freeing < wanted && !away_.empty()) {
    const StashPtr first = ifAlive(away_.begin()->second);
    if (!first) {
      list(*away_.begin()->second, nullptr);
    } else if (via_.isDone(*first->left_) && startSpilling(*first)) {
      freeing += first->nbytes_;
    } else {
      break;
    }
  }
  ++stats_.hostWaits;
  if (!spilling_.empty()) {
    spilling_.front()->account_->waitedByHost += spilling_.front()->nbytes_;
    asDiskEvent(*spilling_.front()->written_).wait();
  } else if (!returning_.empty()) {
    via_.finish(*returning_.front()->returned_);
  } else if (!leaving_.empty()) {
    via_.finish(*leaving_.front()->left_);
  } else if (!held_.empty()) {
    via_.finish(*held_.front().until);
  } else {
    --stats_.hostWaits;
    return false;
  }
  reapDone();
  return true;
}

bool Offload::startSpilling(Stash& stash) {
  c10::Storage room = Disk::get().allocate(stash.nbytes_);
  if (!room) {
    return false;
  }
  stash.onDisk_ = std::move(room);
  stash.written_ = Disk::get().write(stash.onDisk_, stash.onHost_, stash.nbytes_);
  list(stash, nullptr);
  spilling_.push_back(StashPtr::reclaim_copy(&stash));
  stats_.bytesSpilled += stash.nbytes_;
  stash.account_->spilled += stash.nbytes_;
  return true;
}

void Offload::startReading(Stash& stash, c10::Storage memory) {
  stash.read_ = Disk::get().read(memory, stash.onDisk_, stash.nbytes_);
  stash.onHost_ = std::move(memory);
  stash.state_ = Stash::State::Reading;
  list(stash, nullptr);
  reading_.push_back(StashPtr::reclaim_copy(&stash));
}

// It is needed on the device, so it must be in host memory first.
void Offload::bringToHost(Stash& stash) {
  settleDisk(stash);
  if (stash.state_ != Stash::State::Spilled) {
    return;
  }
  c10::Storage memory = hostMemory(stash.nbytes_, stash.device_);
  if (!memory) {
    memory = pool_.take(stash.nbytes_, stash.device_, true);
  }
  TORCH_CHECK(
      memory,
      "ebb: cannot bring back ",
      stash.account_->of,
      ": there is no host memory to read it from disk into. Free some, or lower pinned_limit in "
      "ebb.offload.configure.");
  startReading(stash, std::move(memory));
  settleDisk(stash);
  checkDone(stash, *stash.read_);
}

// Waits for what is under way to or from disk.
void Offload::settleDisk(Stash& stash) {
  if (stash.written_) {
    asDiskEvent(*stash.written_).wait();
    remove(spilling_, stash);
    stash.written_ = nullptr;
    stash.onDisk_ = c10::Storage();  // it is needed now, and still in host memory
  }
  if (stash.state_ == Stash::State::Reading) {
    ++stats_.hostWaits;
    stash.account_->waitedByHost += stash.nbytes_;
    asDiskEvent(*stash.read_).wait();
    remove(reading_, stash);
    wasRead(stash);
  }
}

void Offload::wasRead(Stash& stash) {
  if (stash.read_->error().empty()) {
    stash.state_ = Stash::State::Away;
    stash.onDisk_ = c10::Storage();
    list(stash, &away_);
  } else {
    stash.state_ = Stash::State::Spilled;
    list(stash, &spilled_);
    pool_.give(std::move(stash.onHost_));
  }
}

// Takes note of reads and writes that are done.
void Offload::reapDisk() {
  while (!spilling_.empty() && asDiskEvent(*spilling_.front()->written_).isDone()) {
    const StashPtr stash = std::move(spilling_.front());
    spilling_.pop_front();
    if (const std::string error = stash->written_->error(); !error.empty()) {
      warnOfFailure(*stash, ", stays in host memory: ", error);
      stash->onDisk_ = c10::Storage();
    } else {
      stash->state_ = Stash::State::Spilled;
      list(*stash, &spilled_);
      pool_.give(std::move(stash->onHost_));
    }
    stash->written_ = nullptr;
  }
  while (!reading_.empty() && asDiskEvent(*reading_.front()->read_).isDone()) {
    const StashPtr stash = std::move(reading_.front());
    reading_.pop_front();
    wasRead(*stash);
  }
}

void Offload::checkDone(const Stash& stash, const Event& event) {
  const std::string error = event.error();
  TORCH_CHECK(
      error.empty(),
      "ebb: cannot bring back ",
      stash.account_->of,
      ": ",
      error,
      ". Run forward again, with a disk tier elsewhere or none (ebb.offload.configure(disk='')).");
}

}  // namespace ebb
