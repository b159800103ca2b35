// Events, which are reused.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>

#include "ebb/export.h"

namespace ebb {

// An event whose queries and waits do not disturb another thread's capture: see Note [Captures of
// other threads].
class Event {
 public:
  Event(c10::DeviceType type, c10::EventFlag flag) : event_(type, flag) {}

  void record(c10::Stream stream) { event_.record(stream); }
  // Work given to `stream` from now on runs after the event.
  void block(c10::Stream stream) const { event_.block(stream); }
  c10::Device device() const { return event_.device(); }
  bool query() const;
  void synchronize() const;
  double elapsedTime(const Event& later) const;  // in milliseconds

 private:
  c10::Event event_;
};

using EventPtr = std::shared_ptr<const Event>;

// An event after all work that `stream` has been given so far. Creating an event takes as long as
// recording it, so events are reused when no reference is left. Only events with the flag
// BACKEND_DEFAULT measure time.
EBB_API EventPtr
recordEvent(c10::Stream stream, c10::EventFlag flag = c10::EventFlag::PYTORCH_DEFAULT);

}  // namespace ebb
