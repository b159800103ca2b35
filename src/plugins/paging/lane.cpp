#include "plugins/paging/lane.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <utility>

#include "stream/stream.h"

namespace ebb {

// The lane's stream has a high priority: other work waits for the lane's small kernels, and a high
// priority lets them run before large kernels of other streams.
PageLane::PageLane(c10::Device device, DroppingMutex& drops) : device_(device), drops_(drops) {
  if (!device.is_cpu()) {
    stream_ = streamFromPool(device, /*isHighPriority=*/true);
  }
}

PageLane::Call PageLane::run(const std::function<void()>& work, std::vector<c10::Storage> held) {
  give(work, /*afterCompute=*/true);
  Call call = mark();
  if (stream_) {
    held_.push_back({call, currentStream(device_), std::move(held)});
  }
  return call;
}

void PageLane::give(const std::function<void()>& work, bool afterCompute) {
  if (!stream_) {
    work();
    return;
  }
  capture();  // notices a new capture
  if (afterCompute || !captures_.areTogether()) {
    orderAfter(*stream_, currentStream(device_));
    captures_.join();
  }
  const c10::StreamGuard on(*stream_);
  work();
}

PageLane::Call PageLane::mark() {
  if (!stream_ || !captures_.areTogether()) {
    return {};
  }
  return {++last_, captures_.current(), recordEvent(*stream_)};
}

void PageLane::hold(const Call& call, c10::Stream made, c10::Storage& bytes) {
  if (call.number == 0) {
    drops_.drop(bytes);
  } else {
    held_.push_back({call, made, {std::exchange(bytes, c10::Storage())}});
  }
}

void PageLane::wait(const Call& call) {
  if (call.number == 0 || call.capture != capture()) {
    return;
  }
  const c10::Stream compute = currentStream(device_);
  call.end->block(compute);
  const auto isOver = [&](const Held& held) {
    return held.stream == compute && held.until.number <= call.number;
  };
  release(isOver, compute);
}

void PageLane::join() {
  const c10::Stream compute = currentStream(device_);
  Call last;
  for (const Held& held : held_) {
    if (held.stream == compute && held.until.number > last.number) {
      last = held.until;
    }
  }
  wait(last);
}

// Usually the lane holds no memory here, since the compute stream has waited for the latest
// restore.
void PageLane::joinAll(bool always) {
  const uint64_t now = capture();
  const auto isOfNow = [&](const Held& held) { return held.until.capture == now; };
  const bool isHeld = std::any_of(held_.begin(), held_.end(), isOfNow);
  if (isHeld || always) {
    wait(mark());
  }
  release(isOfNow, currentStream(device_));
}

void PageLane::finish() {
  if (stream_ && capture() == 0 && over_ < last_) {
    const Call all = mark();
    all.end->synchronize();
    noteOver(all);
  }
}

void PageLane::noteOver(const Call& call) {
  const auto isOver = [&](const Held& held) { return held.until.number <= call.number; };
  release(isOver, std::nullopt);
  over_ = call.number;
}

// Releases the held storages that `isOver` selects. `user`: a stream that has waited for the lane.
// If another stream owns the memory, the allocator reuses the memory only after `user` has reached
// that wait.
void PageLane::release(
    const std::function<bool(const Held&)>& isOver, std::optional<c10::Stream> user) {
  const auto over =
      std::stable_partition(held_.begin(), held_.end(), [&](auto& held) { return !isOver(held); });
  for (auto held = over; held != held_.end(); ++held) {
    for (c10::Storage& storage : held->storages) {
      if (user) {
        noteUse(storage, *user);
      }
      drops_.drop(storage);
    }
  }
  held_.erase(over, held_.end());
}

// Notices the end of a capture, and then releases the memory held for the capture's calls. A
// capture that the lane has joined ends when the lane is no longer captured.
uint64_t PageLane::capture() {
  if (!stream_) {
    return 0;
  }
  const c10::Stream compute = currentStream(device_);
  if (captures_.isOver(compute, *stream_)) {
    const uint64_t over = captures_.end();
    release([&](const Held& held) { return held.until.capture == over; }, std::nullopt);
  }
  captures_.begin(compute);
  return captures_.current();
}

}  // namespace ebb
