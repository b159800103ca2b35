#include "paging/lane.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <iterator>
#include <utility>

namespace ebb {

PageLane::PageLane(c10::Device device) : device_(device) {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    stream_ = guard.getStreamFromGlobalPool(device, false);
  }
}

PageLane::Ticket PageLane::run(const std::function<void()>& work, std::vector<c10::Storage> held) {
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
  Ticket ticket{++last_, std::make_shared<c10::Event>(device_.type())};
  ticket.end->record(*stream_);
  held_.push_back({ticket, std::move(held)});
  return ticket;
}

void PageLane::wait(const Ticket& ticket, std::vector<c10::Storage>& dropped) {
  if (ticket.number == 0) {
    return;
  }
  ticket.end->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  while (!held_.empty() && held_.front().until.number <= ticket.number) {
    auto& storages = held_.front().storages;
    dropped.insert(
        dropped.end(),
        std::make_move_iterator(storages.begin()),
        std::make_move_iterator(storages.end()));
    held_.pop_front();
  }
}

void PageLane::join(std::vector<c10::Storage>& dropped) {
  if (!held_.empty()) {
    const Ticket last = held_.back().until;
    wait(last, dropped);
  }
}

}  // namespace ebb
