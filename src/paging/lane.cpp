#include "paging/lane.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "memory/capturing.h"
#include "memory/events.h"
#include "paging/streams.h"

namespace ebb {
namespace {

// Held calls belong to the current capture, or were over when that capture began, so numbers
// suffice.
bool isOverWith(const PageLane::Call& call, const PageLane::Call& last) {
  return call.number <= last.number;
}

}  // namespace

// torch hands out streams from a shared pool, so other code may use the same stream. Few users take
// streams of high priority. A high priority also keeps small kernels, which other work waits for,
// from queueing behind large ones.
PageLane::PageLane(c10::Device device, DroppingMutex& drops) : device_(device), drops_(drops) {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    stream_ = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
  }
}

PageLane::Call PageLane::run(const std::function<void()>& work, std::vector<c10::Storage> held) {
  give(work, After::Compute);
  Call call = mark();
  if (stream_) {
    held_.push_back({call, currentStream(device_), std::move(held)});
  }
  return call;
}

void PageLane::give(const std::function<void()>& work, After after) {
  if (!stream_) {
    work();
    return;
  }
  const bool joinsCapture = capture() != 0 && !isCaptured();
  if (after == After::Compute || joinsCapture) {
    recordEvent(currentStream(device_))->block(*stream_);
  }
  const c10::StreamGuard on(*stream_);
  work();
}

PageLane::Call PageLane::mark() {
  if (!stream_) {
    return {};
  }
  return {++last_, capture_, recordEvent(*stream_)};
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
    return held.compute == compute && isOverWith(held.until, call);
  };
  letGo(isOver, compute);
}

void PageLane::join() {
  if (held_.empty()) {
    return;
  }
  const c10::Stream compute = currentStream(device_);
  Call last;
  for (const Held& held : held_) {
    if (held.compute == compute && held.until.number > last.number) {
      last = held.until;
    }
  }
  wait(last);
}

// Usually nothing is held, since the stream has waited for the latest restore. In a capture that
// the lane has not joined, wait() does nothing.
void PageLane::joinAll(bool simply) {
  if (!stream_) {
    return;
  }
  const uint64_t now = capture();
  const auto isOfNow = [&](const Held& held) { return held.until.capture == now; };
  const bool isHeld = std::any_of(held_.begin(), held_.end(), isOfNow);
  if (isHeld || simply) {
    wait(mark());
  }
  letGo(isOfNow, currentStream(device_));
}

void PageLane::finish() {
  if (stream_ && capture() == 0 && over_ < last_) {
    const Call all = mark();
    all.end->synchronize();
    noteOver(all);
  }
}

void PageLane::noteOver(const Call& call) {
  const auto isOver = [&](const Held& held) { return isOverWith(held.until, call); };
  letGo(isOver, std::nullopt);
  over_ = call.number;
}

// Releases the held storages that `what` selects. `user`: a stream that has waited for the lane and
// does not own the memory. The allocator then reuses the memory only after `user` has reached the
// wait.
void PageLane::letGo(
    const std::function<bool(const Held&)>& what, std::optional<c10::Stream> user) {
  const auto kept = std::stable_partition(
      held_.begin(), held_.end(), [&](const Held& held) { return !what(held); });
  for (auto held = kept; held != held_.end(); ++held) {
    for (c10::Storage& storage : held->storages) {
      if (user) {
        noteUse(storage, *user);
      }
      drops_.drop(storage);
    }
  }
  held_.erase(kept, held_.end());
}

bool PageLane::isCaptured() const {
  const c10::StreamGuard on(*stream_);
  return isCapturing(device_);
}

// A capture begins when the compute stream is captured and the lane is not; a capture is over when
// neither is. If only the lane is captured, the caller is outside of the capture.
uint64_t PageLane::capture() {
  if (!stream_) {
    return 0;
  }
  const bool computes = isCapturing(device_);
  if (!computes && capture_ == 0) {
    return 0;
  }
  const bool itself = isCaptured();
  if (!itself) {
    capture_ = computes ? ++captures_ : 0;
  }
  const auto isOver = [&](const Held& held) {
    return held.until.capture != 0 && held.until.capture != capture_;
  };
  letGo(isOver, std::nullopt);
  return capture_;
}

}  // namespace ebb
