// Recomputable values that regions keep while memory is free.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "ebb/ahead.h"
#include "graph/graph.h"
#include "plugins/ahead/lookahead.h"

namespace ebb {

// Note [Kept while there is room]
// The memory that a step leaves free is not known in advance. So ebb records values as recomputable
// and still keeps them in memory, where autograd finds them as in eager. On entry to a region, ebb
// adds the bytes in use on a device to the most that any one region has kept there so far. If the
// sum exceeds the device's limit, the earliest regions free their kept values, and backward
// recomputes them. Backward reaches the earliest regions last, when the memory of the others is
// free. In all other respects ebb treats kept values as in Note [Replays ahead of backward]; the
// limit of that note does not apply. If an allocator runs short, all regions free their kept values
// on that device, and the limit is lower from then on: see Note [Memory given back].
class EBB_API Room {
 public:
  static Room& get();

  // The limit of the bytes in use on each device; 0 switches the mechanism off.
  void setLimit(size_t nbytes);
  // The limit of one device.
  void setLimit(size_t nbytes, c10::Device device);
  size_t limit(c10::Device device);
  bool isOn() const { return isOn_.load(std::memory_order_relaxed); }

  // Recording of a graph that may keep values has begun.
  void opened(const c10::intrusive_ptr<Graph>& graph);
  // Recording of the graph has ended.
  void closed(const c10::intrusive_ptr<Graph>& graph);

  // Called before a region is entered: makes room for the region's kept values.
  void make();

  // An allocator has run short: all graphs free their kept values on the device. False if there is
  // none. See Note [Memory given back].
  bool giveBack(c10::Device device);

  RoomStats stats();

  // For tests: the number of graphs in the lists below.
  size_t graphs();

 private:
  struct OnDevice {
    size_t limit = 0;    // 0: Room::limit_
    size_t largest = 0;  // the most bytes that one graph has kept so far
  };

  void make(c10::Device device, size_t needed);

  // The earliest graph that keeps values on `device`; null if there is none.
  c10::intrusive_ptr<Graph> takeFirst(c10::Device device);

  void tighten(c10::Device device, size_t used);
  void count(size_t given);

  std::atomic<bool> isOn_{false};
  std::mutex mutex_;              // guards all members below
  std::deque<WeakGraph> closed_;  // closed graphs that keep values, the earliest first
  std::vector<WeakGraph> open_;   // graphs that are being recorded
  // Graphs that an allocator has asked. A graph may die with its reference here, and needs the GIL
  // then, so the references are dropped at the next begin or end of a region.
  std::vector<c10::intrusive_ptr<Graph>> asked_;
  size_t mostGraphs_ = 64;  // beyond this number, graphs that keep nothing are removed
  size_t limit_ = 0;        // bytes, on a device without its own limit
  std::unordered_map<c10::Device, OnDevice> devices_;
  RoomStats stats_;
};

}  // namespace ebb
