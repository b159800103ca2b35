#include "stream/event.h"

#include <array>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "memory/cuda_runtime.h"

namespace ebb {
namespace {

using OwnedEvent = std::unique_ptr<Event>;

// Keeps unused events with the same flag, for later calls of recordEvent().
class FreeEvents {
 public:
  static FreeEvents& of(c10::EventFlag flag) {
    // Leaked on purpose: events may outlive static objects.
    static auto* all = new std::array<FreeEvents, 2>;
    return (*all)[flag == c10::EventFlag::PYTORCH_DEFAULT ? 0 : 1];
  }

  OwnedEvent take(c10::Device device, c10::EventFlag flag) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<OwnedEvent>& free = free_[device];
    if (free.empty()) {
      return std::make_unique<Event>(device.type(), flag);
    }
    OwnedEvent event = std::move(free.back());
    free.pop_back();
    return event;
  }

  void give(OwnedEvent event) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_[event->device()].push_back(std::move(event));
  }

 private:
  std::mutex mutex_;  // guards free_
  std::unordered_map<c10::Device, std::vector<OwnedEvent>> free_;
};

}  // namespace

bool Event::query() const {
  const RelaxedCaptures relaxed;
  return event_.query();
}

void Event::synchronize() const {
  const RelaxedCaptures relaxed;
  event_.synchronize();
}

double Event::elapsedTime(const Event& later) const {
  const RelaxedCaptures relaxed;
  return event_.elapsedTime(later.event_);
}

EventPtr recordEvent(c10::Stream stream, c10::EventFlag flag) {
  FreeEvents& events = FreeEvents::of(flag);
  OwnedEvent event = events.take(stream.device(), flag);
  event->record(stream);
  return {event.release(), [&events](Event* last) { events.give(OwnedEvent(last)); }};
}

}  // namespace ebb
