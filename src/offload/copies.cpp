#include "offload/copies.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "stream/stream.h"

namespace ebb {
namespace {

using State = HostStash::State;

}  // namespace

void Copies::noticeCapture(c10::Device device) {
  if (capture() != 0) {
    if (!captures_.isOver(via_.computeStream(*device_), via_.outStream(*device_))) {
      return;
    }
    endCapture();
  }
  device_ = device;
  if (captures_.begin(via_.computeStream(device))) {
    outside_ = std::exchange(now_, {});
  }
}

void Copies::noticeCapture() {
  if (device_) {
    noticeCapture(*device_);
  }
}

// Handles the end of a capture. Copies still in progress are part of the captured graph, so their
// host memory belongs to the graph.
void Copies::endCapture() {
  context_.host.captureIsOver();
  const uint64_t over = captures_.end();
  for (Leaving& leaving : now_.leaving) {
    give(leaving.memory, leaving.packedOn.device(), over);
  }
  releaseHeld(over, [](const HeldMemory::Held&) { return true; });
  now_ = std::exchange(outside_, {});
}

// Returns the list of copies to which the stash belongs: the list of the current capture, or the
// list outside of all captures. Null for a stash of a capture that is over.
Copies::UnderWay* Copies::placeOf(const HostStash& stash) {
  return stash.sent.capture == capture() ? &now_ : stash.sent.capture == 0 ? &outside_ : nullptr;
}

void Copies::give(c10::Storage& onHost, c10::Device device, uint64_t capture) {
  if (!onHost) {
    return;
  }
  if (capture == 0) {
    context_.host.give(std::move(onHost), device);
  } else if (capture == this->capture()) {
    context_.host.giveToCapture(std::move(onHost), device);
  } else {
    context_.host.giveToGraph(std::move(onHost));
  }
}

void Copies::give(Memory& memory, c10::Device device, uint64_t capture) {
  context_.drop(memory.onDevice);
  give(memory.onHost, device, capture);
}

void Copies::send(HostStash& stash) {
  stash.sent.capture = capture();
  noteUse(stash.onDevice, stash.sent.stream);
  ++now_.unfetched;
  now_.kept.push_back(&stash);
  while (now_.kept.size() > context_.settings.keepLast) {
    const HostStashPtr first = ifAlive(now_.kept.front());
    now_.kept.pop_front();
    if (first) {
      startLeaving(*first);
    }
  }
}

void Copies::startLeaving(HostStash& stash) {
  if (std::find(devices_.begin(), devices_.end(), stash.device()) == devices_.end()) {
    devices_.push_back(stash.device());
  }
  const c10::Stream out = via_.outStream(stash.device());
  via_.wait(out, via_.record(stash.sent.stream));
  via_.copy(stash.onHost, stash.onDevice, stash.sent.nbytes, out);
  captures_.join();
  stash.left = via_.record(out);
  stash.become(State::Leaving);
  now_.leaving.push_back(
      {&stash, stash.left, stash.sent.stream, stash.account, stash.sent.nbytes, {}});
  now_.leavingBytes += stash.sent.nbytes;
  OffloadStats& stats = context_.stats;
  stats.bytesSent += stash.sent.nbytes;
  stats.mostInFlight = std::max<uint64_t>(stats.mostInFlight, now_.leavingBytes);
  stash.account->sent += stash.sent.nbytes;
  while (now_.leavingBytes > context_.settings.inFlightBytes) {
    waitForFirst();
  }
}

// Waits for the copy to the host that started first.
void Copies::waitForFirst() {
  const Leaving& first = now_.leaving.front();
  if (context_.settings.isStatic) {
    via_.wait(first.packedOn, first.left);
    first.account->waitedByDevice += first.nbytes;
    firstHasLeft();
  } else {
    ++context_.stats.hostWaits;
    first.account->waitedByHost += first.nbytes;
    via_.finish(*first.left);
    reap();
  }
}

// Handles the end of the first copy to the host. Called when the copy is done or, in static mode,
// when later work on the compute stream waits for the copy.
void Copies::firstHasLeft() {
  Leaving first = std::move(now_.leaving.front());
  now_.leaving.pop_front();
  now_.leavingBytes -= first.nbytes;
  if (first.stash == nullptr) {
    give(first.memory, first.packedOn.device(), capture());
    return;
  }
  HostStash& stash = *first.stash;
  if (stash.state() != State::Leaving) {
    give(stash.onHost, stash.device(), capture());  // the stash was fetched meanwhile
    return;
  }
  if (!first.left->error().empty()) {
    stays(stash, *first.left);
    return;
  }
  stash.lost = !stash.hasWhatWasSent();
  stash.become(State::Away);
  context_.drop(stash.onDevice);
  context_.away.emplace(stash.sent.sequence, &stash);
}

void Copies::beforeWrite(HostStash& stash) {
  if (stash.state() == State::NotSent) {
    takeOut(now_.kept, stash);
    startLeaving(stash);
  }
  if (stash.state() == State::Leaving) {
    finishLeaving(stash);
  }
}

void Copies::finishLeaving(HostStash& stash) {
  via_.wait(via_.computeStream(stash.device()), stash.left);
  const auto place =
      std::find_if(now_.leaving.begin(), now_.leaving.end(), [&](const Leaving& leaving) {
        return leaving.stash == &stash;
      });
  now_.leaving.erase(place);
  now_.leavingBytes -= stash.sent.nbytes;
  if (!stash.left->error().empty()) {
    stays(stash, *stash.left);
    moveToCopy(stash);
    return;
  }
  context_.drop(stash.onDevice);  // the memory's next user is ordered after the write
  stash.become(State::Away);
  context_.away.emplace(stash.sent.sequence, &stash);
}

// Keeps a stash on the device whose copy to the host failed.
void Copies::stays(HostStash& stash, const TransferEvent& left) {
  stash.warnOfFailure("stays in memory", left.error());
  stash.become(State::NotSent);
}

// The copy of a stash to the host has failed, and the program is about to write to the storage.
// Copies the bytes to other memory.
void Copies::moveToCopy(HostStash& stash) {
  c10::Storage copy = via_.allocateOnDevice(stash.sent.nbytes, stash.device());
  std::memcpy(copy.mutable_data(), stash.onDevice.data(), stash.sent.nbytes);
  context_.drop(stash.onDevice);
  stash.sent.address = copy.data();
  stash.onDevice = std::move(copy);
}

void Copies::startReturning(HostStash& stash) {
  stash.onDevice = via_.allocateOnDevice(stash.sent.nbytes, stash.device());
  const c10::Stream in = via_.inStream(stash.device());
  stash.back.stream = via_.computeStream(stash.device());
  via_.wait(in, via_.record(*stash.back.stream));
  via_.wait(in, stash.left);
  via_.copy(stash.onDevice, stash.onHost, stash.sent.nbytes, in);
  stash.back.end = via_.record(in);
  stash.become(State::Returning);
  context_.away.erase(stash.sent.sequence);
  now_.returning.push_back(&stash);
  context_.stats.bytesFetched += stash.sent.nbytes;
  stash.account->fetched += stash.sent.nbytes;
}

void Copies::takeReturning(HostStash& stash, c10::Stream compute) {
  const bool isStatic = context_.settings.isStatic;
  if (*stash.back.stream != compute) {
    noteUse(stash.onDevice, compute);
  }
  if (!stash.back.ahead || (!isStatic && !via_.isDone(*stash.back.end))) {
    stash.account->waitedByDevice += stash.sent.nbytes;
  }
  via_.wait(compute, stash.back.end);
  stash.checkCameBack(*stash.back.end);
  // If the stash is not in the list, reap() has given back the host memory before.
  if (!takeOut(now_.returning, stash)) {
    return;
  }
  if (isStatic) {
    via_.wait(via_.outStream(stash.device()), stash.back.end);
    give(stash.onHost, stash.device(), capture());
  } else {
    now_.held.hold(stash.back.end, compute, {{}, std::move(stash.onHost)});
  }
}

void Copies::handOver(HostStash& stash, c10::Stream compute) {
  if (stash.back.stream && *stash.back.stream != compute) {
    via_.wait(compute, via_.record(*stash.back.stream));
    noteUse(stash.onDevice, compute);
  }
}

void Copies::giveDeviceMemory(HostStash& stash) {
  UnderWay* place = placeOf(stash);
  if (place != nullptr && takeOut(place->returning, stash)) {
    place->held.hold(
        stash.back.end, *stash.back.stream, {std::move(stash.onDevice), std::move(stash.onHost)});
  }
  context_.drop(stash.onDevice);  // null if the memory is held above; otherwise the copy is done
}

bool Copies::isKnownDone(const TransferEvent& event) {
  try {
    return !context_.settings.isStatic && capture() == 0 && via_.isDone(event);
  } catch (const c10::Error&) {
    return false;  // the device has failed: the user's next call raises the error
  }
}

// Gives the host memory back once no copy uses it. A copy to the host may still be in progress,
// because a write to the storage makes the stash Away before its copy is done.
void Copies::giveHostMemory(HostStash& stash) {
  UnderWay* place = placeOf(stash);
  if (place != nullptr && stash.left && !isKnownDone(*stash.left)) {
    place->held.hold(stash.left, stash.sent.stream, {{}, std::move(stash.onHost)});
  } else {
    give(stash.onHost, stash.device(), stash.sent.capture);
  }
}

void Copies::fetched(HostStash& stash) {
  if (UnderWay* place = placeOf(stash)) {
    --place->unfetched;
    takeOut(place->kept, stash);
  }
  if (stash.state() == State::NotSent || stash.state() == State::Away) {
    giveHostMemory(stash);  // otherwise the copy is in progress, or was handled
  }
  stash.become(State::Back);
}

void Copies::forget(HostStash& stash) {
  UnderWay* place = placeOf(stash);
  if (place != nullptr) {
    place->unfetched -= stash.state() != State::Back;
    takeOut(place->kept, stash);
    for (Leaving& leaving : place->leaving) {
      if (stash.onHost && leaving.stash == &stash) {
        leaving.stash = nullptr;
        leaving.memory = {std::move(stash.onDevice), std::move(stash.onHost)};
      }
    }
    if (stash.state() == State::Returning) {
      giveDeviceMemory(stash);
    }
  }
  if (stash.onHost) {
    giveHostMemory(stash);
  }
  context_.drop(stash.onDevice);
}

void Copies::reap() {
  while (!now_.leaving.empty() && via_.isDone(*now_.leaving.front().left)) {
    firstHasLeft();
  }
  while (!now_.returning.empty() && via_.isDone(*now_.returning.front()->back.end)) {
    HostStash& stash = *now_.returning.front();
    now_.returning.pop_front();
    give(stash.onHost, stash.device(), capture());
  }
  releaseHeld(capture(), [&](const HeldMemory::Held& held) { return via_.isDone(*held.until); });
}

// Releases memory that was held in `capture`, up to the first memory that is still in use.
void Copies::releaseHeld(
    uint64_t capture, const std::function<bool(const HeldMemory::Held&)>& isOver) {
  now_.held.releaseWhile(
      isOver, [&](HeldMemory::Held& held) { give(held.memory, held.stream.device(), capture); });
}

void Copies::reapUnused() {
  while (!now_.leaving.empty() && now_.leaving.front().stash == nullptr) {
    waitForFirst();
  }
  if (now_.unfetched == 0) {
    joinAll();
  }
}

// The compute streams wait for all values that are being copied to the host. Copies leave a device
// in order, so each stream waits only for the last of the values packed on that stream.
void Copies::joinLeaving() {
  std::vector<c10::Stream> waiting;
  for (auto leaving = now_.leaving.rbegin(); leaving != now_.leaving.rend(); ++leaving) {
    leaving->account->waitedByDevice += leaving->nbytes;
    if (std::find(waiting.begin(), waiting.end(), leaving->packedOn) == waiting.end()) {
      via_.wait(leaving->packedOn, leaving->left);
      waiting.push_back(leaving->packedOn);
    }
  }
  while (!now_.leaving.empty()) {
    firstHasLeft();
  }
}

// The compute streams wait for all copies.
void Copies::joinAll() {
  joinLeaving();
  releaseHeld(capture(), [&](const HeldMemory::Held& held) {
    via_.wait(held.stream, held.until);
    if (held.memory.onHost) {
      via_.wait(via_.outStream(held.stream.device()), held.until);
    }
    return true;  // later work on these streams may use the memory
  });
}

bool Copies::freeLeaving() {
  if (now_.leaving.empty()) {
    return false;
  }
  if (context_.settings.isStatic) {
    joinLeaving();
  } else {
    ++context_.stats.hostWaits;
    via_.finish(*now_.leaving.back().left);
    reap();
  }
  return true;
}

// Waits for the streams, not for the listed copies: in static mode a copy leaves its list before
// the host knows that the copy is done.
void Copies::finishAll() {
  for (const c10::Device device : devices_) {
    via_.finish(*via_.record(via_.outStream(device)));
    via_.finish(*via_.record(via_.inStream(device)));
  }
}

bool Copies::finishOne() {
  const TransferEventPtr next = !now_.returning.empty()    ? now_.returning.front()->back.end
                                : !now_.held.all().empty() ? now_.held.all().front().until
                                : !now_.leaving.empty()    ? now_.leaving.front().left
                                                           : nullptr;
  if (next) {
    via_.finish(*next);
  }
  return next != nullptr;
}

}  // namespace ebb
