#include "plugins/offload/spill.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <string>
#include <utility>

#include "plugins/offload/transfer/disk.h"

namespace ebb {
namespace {

using State = HostStash::State;

}  // namespace

c10::Storage Spill::hostMemory(size_t nbytes, c10::Device device, HostUser user) {
  if (copies_.capture() != 0) {
    return hostMemoryOfCapture(nbytes, device);
  }
  // Without an accelerator the "host memory" is room in the disk file, which has its own limit.
  const OffloadSettings& settings = context_.settings;
  const size_t limit = context_.via.isDisk() ? SIZE_MAX : settings.pinnedLimit;
  context_.host.setLimit(limit);
  c10::Storage memory = context_.host.take(nbytes, device, user);
  while (!memory && makeRoom(nbytes)) {
    memory = context_.host.take(nbytes, device, user);
  }
  return memory;
}

// In a capture the host can neither allocate host memory nor wait for it.
c10::Storage Spill::hostMemoryOfCapture(size_t nbytes, c10::Device device) {
  context_.host.setLimit(context_.settings.pinnedLimit);
  c10::Storage memory = context_.host.takeForCapture(nbytes, device);
  TORCH_CHECK(
      memory || !context_.host.hasRoomFor(nbytes), "ebb: OFFLOAD has no free host memory for ",
      nbytes,
      " bytes, and none can be allocated during CUDA graph capture. Run a few steps, forward and "
      "backward, right before each capture, because each captured graph keeps its host memory.");
  return memory;
}

// Waits until some host memory is free or one more value can be spilled. False if there is nothing
// to wait for.
bool Spill::makeRoom(size_t nbytes) {
  const OffloadSettings& settings = context_.settings;
  const bool possible =
      Disk::get().isOpen() && !context_.via.isDisk() && nbytes <= settings.pinnedLimit;
  if (!possible) {
    return false;
  }
  // Spills an eighth of the limit at least, so that the next values need not wait.
  startSpilling(std::max(nbytes, settings.pinnedLimit / 8));
  if (!spilling_.empty()) {
    const HostStash& first = *spilling_.front();
    first.account->waitedByHost += first.sent.nbytes;
    first.disk.written->wait();
  } else if (!copies_.waitForFirst()) {
    return false;
  }
  ++context_.stats.hostWaits;
  copies_.reap();
  reap();
  return true;
}

// Starts writes until `nbytes` are on the way to disk. The host waits for the first value's copy to
// the host if no other value is on the way.
void Spill::startSpilling(size_t nbytes) {
  size_t freeing = 0;
  for (const HostStashPtr& stash : spilling_) {
    freeing += stash->sent.nbytes;
  }
  while (freeing < nbytes && !context_.away.empty()) {
    HostStash& first = *context_.away.begin()->second;
    const HostStashPtr alive = ifAlive(&first);
    if (!alive || first.sent.capture != 0) {
      context_.away.erase(context_.away.begin());
      continue;
    }
    if (freeing == 0) {
      first.left->wait();
    }
    if (!first.left->isDone() || !startWriting(first)) {
      return;
    }
    freeing += first.sent.nbytes;
  }
}

bool Spill::startWriting(HostStash& stash) {
  c10::Storage room = Disk::get().allocate(stash.sent.nbytes);
  if (!room) {
    return false;
  }
  stash.disk.room = std::move(room);
  stash.disk.written = Disk::get().write(stash.disk.room, stash.onHost, stash.sent.nbytes);
  context_.away.erase(stash.sent.sequence);
  spilling_.push_back(HostStashPtr::reclaim_copy(&stash));
  context_.stats.bytesSpilled += stash.sent.nbytes;
  stash.account->spilled += stash.sent.nbytes;
  return true;
}

void Spill::startReading(HostStash& stash, c10::Storage memory) {
  stash.disk.read = Disk::get().read(memory, stash.disk.room, stash.sent.nbytes);
  stash.onHost = std::move(memory);
  stash.become(State::Reading);
  context_.spilled.erase(stash.sent.sequence);
  reading_.push_back(HostStashPtr::reclaim_copy(&stash));
}

bool Spill::readAhead(HostStash& stash) {
  c10::Storage memory = context_.host.take(stash.sent.nbytes, stash.device(), HostUser::Host);
  const bool found = memory;
  if (found) {
    startReading(stash, std::move(memory));
  }
  return found;
}

void Spill::bringToHost(HostStash& stash) {
  settle(stash);
  if (stash.state() != State::Spilled) {
    return;
  }
  c10::Storage memory = hostMemory(stash.sent.nbytes, stash.device(), HostUser::Host);
  if (!memory) {
    memory = context_.host.take(stash.sent.nbytes, stash.device(), HostUser::Host, true);
  }
  TORCH_CHECK(
      memory, "ebb: cannot restore ", stash.account->of,
      " from disk: no host memory could be allocated for it. Free host memory, or let ebb take "
      "less of it (ebb.config.offload.pinned_limit).");
  startReading(stash, std::move(memory));
  settle(stash);
  stash.checkCameBack(*stash.disk.read);
}

void Spill::settle(HostStash& stash) {
  if (stash.disk.written) {
    stash.disk.written->wait();
    takeOut(spilling_, stash);
    stash.disk.written = nullptr;
    stash.disk.room = c10::Storage();  // the value is needed now, and still in host memory
  }
  if (stash.state() == State::Reading) {
    ++context_.stats.hostWaits;
    stash.account->waitedByHost += stash.sent.nbytes;
    stash.disk.read->wait();
    takeOut(reading_, stash);
    wasRead(stash);
  }
}

void Spill::wasRead(HostStash& stash) {
  if (stash.disk.read->error().empty()) {
    stash.become(State::Away);
    stash.disk.room = c10::Storage();
    context_.away.emplace(stash.sent.sequence, &stash);
  } else {
    stash.become(State::Spilled);
    context_.spilled.emplace(stash.sent.sequence, &stash);
    context_.host.give(std::move(stash.onHost), stash.device(), nullptr);
  }
}

void Spill::wasWritten(HostStash& stash) {
  if (const std::string error = stash.disk.written->error(); !error.empty()) {
    stash.warnOfFailure("stays in host memory", error);
    stash.disk.room = c10::Storage();
  } else {
    stash.become(State::Spilled);
    context_.spilled.emplace(stash.sent.sequence, &stash);
    context_.host.give(std::move(stash.onHost), stash.device(), nullptr);
  }
  stash.disk.written = nullptr;
}

void Spill::reap() {
  while (!spilling_.empty() && spilling_.front()->disk.written->isDone()) {
    const HostStashPtr stash = std::move(spilling_.front());
    spilling_.pop_front();
    wasWritten(*stash);
  }
  while (!reading_.empty() && reading_.front()->disk.read->isDone()) {
    const HostStashPtr stash = std::move(reading_.front());
    reading_.pop_front();
    wasRead(*stash);
  }
}

void Spill::finishAll() {
  for (const HostStashPtr& stash : spilling_) {
    stash->disk.written->wait();
  }
  for (const HostStashPtr& stash : reading_) {
    stash->disk.read->wait();
  }
}

}  // namespace ebb
