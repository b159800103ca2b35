#include "memory/events.h"

#include <c10/core/Device.h>

#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ebb {
namespace {

using EventPtr = std::unique_ptr<c10::Event>;

class FreeEvents {
 public:
  EventPtr take(c10::Device device) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<EventPtr>& free = free_[device];
    if (free.empty()) {
      return std::make_unique<c10::Event>(device.type());
    }
    EventPtr event = std::move(free.back());
    free.pop_back();
    return event;
  }

  void give(EventPtr event) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_[event->device()].push_back(std::move(event));
  }

 private:
  std::mutex mutex_;  // guards free_
  std::unordered_map<c10::Device, std::vector<EventPtr>> free_;
};

FreeEvents& freeEvents() {
  // Leaked on purpose: events may outlive static objects.
  static auto* events = new FreeEvents;
  return *events;
}

}  // namespace

std::shared_ptr<const c10::Event> recordEvent(c10::Stream stream) {
  EventPtr event = freeEvents().take(stream.device());
  event->record(stream);
  return {event.release(), [](c10::Event* last) { freeEvents().give(EventPtr(last)); }};
}

}  // namespace ebb
