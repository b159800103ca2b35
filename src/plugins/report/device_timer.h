// Times of ops on a device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>

#include "stream/capture.h"
#include "stream/event.h"
#include "stream/stream.h"

namespace ebb {

// Measures the time between two points of a stream.
class DeviceTimer {
 public:
  explicit DeviceTimer(c10::Stream stream) : stream_(stream), first_(record()) {}
  void stop() { last_ = record(); }

  // The time from the construction to stop(), in nanoseconds. Waits for the device.
  int64_t elapsed() const {
    last_->synchronize();
    return static_cast<int64_t>(first_->elapsedTime(*last_) * 1e6);
  }

 private:
  EventPtr record() const { return recordEvent(stream_, c10::EventFlag::BACKEND_DEFAULT); }

  const c10::Stream stream_;
  const EventPtr first_;
  EventPtr last_;  // set by stop()
};

// A timer on the current stream of `device`. Null on the CPU, and while a graph is captured.
inline std::unique_ptr<DeviceTimer> startTimer(c10::Device device) {
  const bool isMeasured = !device.is_cpu() && !isCapturing(device);
  return isMeasured ? std::make_unique<DeviceTimer>(currentStream(device)) : nullptr;
}

}  // namespace ebb
