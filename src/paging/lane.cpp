#include "paging/lane.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

namespace ebb {

PageLane::PageLane(c10::Device device, DroppingMutex& drops) : device_(device), drops_(drops) {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    stream_ = guard.getStreamFromGlobalPool(device, false);
  }
}

PageLane::Call PageLane::run(const std::function<void()>& work, std::vector<c10::Storage> held) {
  if (!stream_) {
    work();
    return {};
  }
  const c10::impl::VirtualGuardImpl guard(device_.type());
  c10::Event given(device_.type());
  given.record(guard.getStream(device_));
  given.block(*stream_);
  const c10::StreamGuard on(*stream_);
  work();
  Call call{++last_, std::make_shared<c10::Event>(device_.type())};
  call.end->record(*stream_);
  held_.push_back({call, std::move(held)});
  return call;
}

void PageLane::wait(const Call& call) {
  if (call.number == 0) {
    return;
  }
  call.end->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  while (!held_.empty() && held_.front().until.number <= call.number) {
    for (c10::Storage& storage : held_.front().storages) {
      drops_.drop(storage);
    }
    held_.pop_front();
  }
}

void PageLane::join() {
  if (!held_.empty()) {
    const Call last = held_.back().until;
    wait(last);
  }
}

}  // namespace ebb
