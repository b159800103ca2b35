// Stretches of forward, the units of time of OFFLOAD: see Note [Release in stream order].
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace ebb {

class Stretches {
 public:
  // Counts a value that is sent. Returns true if the stretch is full.
  bool add(size_t nbytes) {
    constexpr size_t kMostValues = 16;
    nbytes_ += nbytes;
    return ++values_ == kMostValues;
  }

  // Ends the current stretch. Returns false if it has no value.
  bool end() {
    longest_ = std::max(longest_, std::exchange(nbytes_, 0));
    current_ += values_ > 0;
    return std::exchange(values_, 0) > 0;
  }

  // Number of the current stretch.
  uint64_t current() const { return current_; }

  // Backward needs a value of a stretch. Returns true if its last value was of another stretch.
  bool moveTo(uint64_t stretch) { return std::exchange(inBackward_, stretch) != stretch; }

  // Bytes of two stretches, as the largest one of this step.
  size_t bytesOfTwo() const { return 2 * std::max(longest_, nbytes_); }

  // No value is away any more.
  void stepIsOver() { longest_ = 0; }

 private:
  uint64_t current_ = 0;
  size_t values_ = 0;  // of the current stretch
  size_t nbytes_ = 0;  // of the current stretch
  size_t longest_ = 0;
  uint64_t inBackward_ = 0;
};

}  // namespace ebb
