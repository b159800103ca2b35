// Follows captures for a stream of ebb's own.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <utility>

#include "stream/capture.h"

namespace ebb {

// For a stream of ebb's beside a compute stream: numbers the captures of the compute stream, and
// records whether ebb's stream has joined the current capture. ebb's stream joins a capture with
// its first work in that capture.
class CaptureWatch {
 public:
  // The number of the current capture; 0: none.
  uint64_t current() const { return current_; }

  // True if the current capture is over. Checks the stream `own` of ebb if `own` has joined the
  // capture; else checks `compute`.
  bool isOver(c10::Stream compute, c10::Stream own) const {
    return current_ != 0 && !isCapturing(joined_ ? own : compute);
  }

  // Notes that the current capture is over. Returns the capture's number.
  uint64_t end() { return std::exchange(current_, 0); }

  // Numbers a new capture if `compute` is being captured and there is no current capture. Returns
  // true if so.
  bool begin(c10::Stream compute) {
    const bool begins = current_ == 0 && isCapturing(compute);
    if (begins) {
      current_ = ++count_;
      joined_ = false;
    }
    return begins;
  }

  // Notes that ebb's stream has been given work in the current capture, if there is one.
  void join() { joined_ = true; }

  // True if ebb's stream and the compute stream are in the same capture, or both in none.
  bool areTogether() const { return current_ == 0 || joined_; }

 private:
  uint64_t count_ = 0;    // captures so far
  uint64_t current_ = 0;  // see current()
  bool joined_ = false;   // ebb's stream has joined the current capture
};

}  // namespace ebb
