// Memory that must live until a stream has done some of its work.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <deque>
#include <utility>

namespace ebb {

// Memory in the order of hold(). `Point` is a point in a stream's work: an event, or a call of a
// lane.
template <class Point, class Memory>
class HeldUntil {
 public:
  struct Held {
    Point until;
    c10::Stream stream;  // stream that owns the memory, as far as known
    Memory memory;
  };

  void hold(Point until, c10::Stream stream, Memory memory) {
    all_.push_back({std::move(until), stream, std::move(memory)});
  }

  const std::deque<Held>& all() const { return all_; }

  // Removes the entries for which `isOver` is true, and calls `release` with each.
  template <class IsOver, class Release>
  void releaseIf(const IsOver& isOver, const Release& release) {
    const auto over = std::stable_partition(
        all_.begin(), all_.end(), [&](const Held& held) { return !isOver(held); });
    for (auto held = over; held != all_.end(); ++held) {
      release(*held);
    }
    all_.erase(over, all_.end());
  }

 private:
  std::deque<Held> all_;
};

}  // namespace ebb
