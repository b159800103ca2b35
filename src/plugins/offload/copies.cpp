#include "plugins/offload/copies.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "stream/stream.h"

namespace ebb {
namespace {

using State = HostStash::State;

constexpr size_t kStretches = 2;  // see Note [Release in stream order]

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
    context_.drop(leaving.memory.onDevice);
    give(leaving.memory.onHost, leaving.packedOn.device(), over, nullptr);
  }
  now_ = std::exchange(outside_, {});
}

// Returns the list of copies to which the stash belongs: the list of the current capture, or the
// list outside of all captures. Null for a stash of a capture that is over.
Copies::UnderWay* Copies::placeOf(const HostStash& stash) {
  return stash.sent.capture == capture() ? &now_ : stash.sent.capture == 0 ? &outside_ : nullptr;
}

// Gives host memory back; null: it has another owner. The caller has ordered the outgoing stream
// after `lastCopy`. `usedIn`: the capture of the copies. Its graph keeps the memory when it is
// over.
void Copies::give(
    c10::Storage& onHost, c10::Device device, uint64_t usedIn, const TransferEventPtr& lastCopy) {
  if (!onHost) {
    return;
  }
  if (usedIn == 0) {
    context_.host.give(std::move(onHost), device, lastCopy);
  } else if (usedIn == capture()) {
    context_.host.giveToCapture(std::move(onHost), device);
  } else {
    context_.host.giveToGraph(std::move(onHost));
  }
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
  while (now_.leavingBytes > context_.settings.inFlightBytes && waitForFirst()) {
  }
}

bool Copies::waitForFirst() {
  if (now_.leaving.empty() || !mayWait(now_.leaving.front().packedOn)) {
    return false;
  }
  Leaving& first = now_.leaving.front();
  join(first);
  context_.stats.hostWaits += via_.isDisk();
  (via_.isDisk() ? first.account->waitedByHost : first.account->waitedByDevice) += first.nbytes;
  hasLeft(first);
  now_.leaving.pop_front();
  return true;
}

// False if `compute` takes part in a capture of another thread, or this thread in a capture without
// that stream: the stream could not wait for a copy of now_.
bool Copies::mayWait(c10::Stream compute) {
  return compute == via_.computeStream(compute.device()) ||
         isCapturing(compute) == (capture() != 0);
}

// The compute stream waits for the copy. If the copy is one back, so does the outgoing stream,
// which may use the host memory next.
void Copies::join(const Leaving& leaving) {
  via_.wait(leaving.packedOn, leaving.left);
  if (leaving.isBack) {
    via_.wait(via_.outStream(leaving.packedOn.device()), leaving.left);
  }
}

// The compute streams wait for the copies for which `isOver` is true, and their memory is released.
// Copies to the host end in the order of the list, so each stream waits only for the last one.
void Copies::release(const std::function<bool(Leaving&)>& isOver) {
  auto& all = now_.leaving;
  const auto stays = [&](Leaving& leaving) {
    return !mayWait(leaving.packedOn) || !isOver(leaving);
  };
  const auto over = std::stable_partition(all.begin(), all.end(), stays);
  std::vector<c10::Stream> waiting;
  for (auto leaving = all.end(); leaving != over;) {
    --leaving;
    const c10::Stream stream = leaving->packedOn;
    if (leaving->isBack) {
      join(*leaving);
    } else if (std::find(waiting.begin(), waiting.end(), stream) == waiting.end()) {
      join(*leaving);
      waiting.push_back(stream);
    }
  }
  std::for_each(over, all.end(), [&](Leaving& leaving) { hasLeft(leaving); });
  all.erase(over, all.end());
}

// Later work on the compute stream runs after the copy: releases the memory.
void Copies::hasLeft(Leaving& leaving) {
  now_.leavingBytes -= leaving.nbytes;
  if (leaving.stash == nullptr) {
    context_.drop(leaving.memory.onDevice);
    give(leaving.memory.onHost, leaving.packedOn.device(), capture(), leaving.left);
    return;
  }
  HostStash& stash = *leaving.stash;
  if (stash.state() != State::Leaving) {  // the stash was fetched meanwhile
    give(stash.onHost, stash.device(), capture(), leaving.left);
    return;
  }
  if (const std::string error = leaving.left->error(); !error.empty()) {
    stash.warnOfFailure("stays in memory", error);
    stash.become(State::NotSent);
    return;
  }
  stash.lost = !stash.hasWhatWasSent();
  stash.become(State::Away);
  context_.drop(stash.onDevice);
  context_.away.emplace(stash.sent.sequence, &stash);
}

void Copies::stretchEnds() {
  if (!via_.isDisk()) {
    release([&](Leaving& leaving) {
      return leaving.packedOn == via_.computeStream(leaving.packedOn.device()) &&
             ++leaving.stretches >= kStretches;
    });
  }
}

void Copies::backwardMovesOn() {
  if (!via_.isDisk()) {
    release([](Leaving& leaving) {
      const bool isUnneeded = leaving.stash == nullptr || leaving.stash->state() == State::Back;
      return isUnneeded && ++leaving.stretches >= kStretches;
    });
  }
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
  const auto place = std::find_if(
      now_.leaving.begin(), now_.leaving.end(),
      [&](const Leaving& leaving) { return leaving.stash == &stash; });
  hasLeft(*place);  // the memory's next user is ordered after the write
  now_.leaving.erase(place);
  if (stash.state() == State::NotSent) {
    moveToCopy(stash);
  }
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
  context_.stats.bytesFetched += stash.sent.nbytes;
  stash.account->fetched += stash.sent.nbytes;
}

void Copies::takeReturning(HostStash& stash, c10::Stream compute) {
  if (*stash.back.stream != compute) {
    noteUse(stash.onDevice, compute);
  }
  if (!stash.back.ahead) {
    stash.account->waitedByDevice += stash.sent.nbytes;
  }
  via_.wait(compute, stash.back.end);
  stash.checkCameBack(*stash.back.end);
  via_.wait(via_.outStream(stash.device()), stash.back.end);
  give(stash.onHost, stash.device(), capture(), stash.back.end);
}

void Copies::handOver(HostStash& stash, c10::Stream compute) {
  if (stash.back.stream && *stash.back.stream != compute) {
    via_.wait(compute, via_.record(*stash.back.stream));
    noteUse(stash.onDevice, compute);
  }
}

void Copies::dropReturning(HostStash& stash) {
  if (UnderWay* place = placeOf(stash)) {
    Memory memory{std::move(stash.onDevice), std::move(stash.onHost)};
    place->leaving.push_back(
        {nullptr, stash.back.end, *stash.back.stream, stash.account, 0, std::move(memory), true});
  }
  context_.drop(stash.onDevice);  // null, except after a capture that failed
}

void Copies::fetched(HostStash& stash) {
  if (UnderWay* place = placeOf(stash)) {
    --place->unfetched;
    takeOut(place->kept, stash);
  }
  if (stash.state() == State::NotSent || stash.state() == State::Away) {
    give(stash.onHost, stash.device(), stash.sent.capture, stash.left);  // else a copy uses it
  }
  stash.become(State::Back);
}

void Copies::forget(HostStash& stash) {
  UnderWay* place = placeOf(stash);
  if (place != nullptr) {
    place->unfetched -= stash.state() != State::Back;
    takeOut(place->kept, stash);
    for (Leaving& leaving : place->leaving) {
      if (leaving.stash == &stash) {
        leaving.stash = nullptr;
        leaving.memory = {std::move(stash.onDevice), std::move(stash.onHost)};
      }
    }
    if (stash.state() == State::Returning) {
      dropReturning(stash);
    }
  }
  give(stash.onHost, stash.device(), stash.sent.capture, stash.left);
  context_.drop(stash.onDevice);
}

void Copies::reap() {
  while (via_.isDisk() && !now_.leaving.empty() && now_.leaving.front().left->isDone()) {
    hasLeft(now_.leaving.front());
    now_.leaving.pop_front();
  }
}

bool Copies::joinAll() {
  const size_t before = now_.leaving.size();
  release([](Leaving&) { return true; });
  return now_.leaving.size() < before;
}

}  // namespace ebb
