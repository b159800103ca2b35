// What regions keep because there is room for it, though it can be made again.
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
#include "graph/lookahead.h"
#include "memory/relief.h"

namespace ebb {

// Note [Kept while there is room]
// How much memory a step leaves free is not known in advance. So every value can be recorded as
// recomputable and still be kept in memory, where autograd finds it as in eager. On entry to a
// region, ebb adds the bytes in use on a device to the most that any one region has kept there so
// far. If the sum exceeds the device's limit, the earliest regions free what they keep, and
// backward recomputes it. The earliest, since backward comes to them last, when the others' memory
// is free. Nothing else is different: what is kept so is kept as in Note [Replays ahead of
// backward], without the limit that counts there. The same is done where an allocation fails, in a
// region or a replay: the earliest regions give up what they keep, the open ones last, and the
// limit is lower from then on. See Note [Allocations that fail].
class EBB_API Room {
 public:
  static Room& get();

  // Bytes in use on each device, or on one; 0: off, on all.
  void setLimit(size_t nbytes);
  void setLimit(size_t nbytes, c10::Device device);
  size_t limit(c10::Device device);
  bool isOn() const {
    return isOn_.load(std::memory_order_relaxed);
  }

  // Recording of a graph that may keep something begins; and has ended.
  void opened(const c10::intrusive_ptr<Graph>& graph);
  void closed(const c10::intrusive_ptr<Graph>& graph);

  // A region is about to be entered: makes room for it.
  void make();

  // An allocation has failed: graphs give up what they keep. False if none keeps anything.
  bool giveBack(Shortage shortage);

  RoomStats stats();

  // For tests: how many graphs it knows of.
  size_t graphs();

 private:
  Room();

  struct OnDevice {
    size_t limit = 0;    // 0: limit_
    size_t largest = 0;  // bytes that one graph has kept
  };

  void make(c10::Device device, size_t needed);

  // The earliest that keeps something there; null if none does.
  c10::intrusive_ptr<Graph> takeFirst(c10::Device device);

  // All that may keep something, the earliest first, and those that are open last.
  std::vector<c10::intrusive_ptr<Graph>> all();

  size_t tighten(Shortage shortage);
  void count(size_t given);

  std::atomic<bool> isOn_{false};
  std::mutex mutex_;              // guards what follows
  std::deque<WeakGraph> graphs_;  // closed ones that keep something, the earliest first
  std::vector<WeakGraph> open_;   // that are being recorded
  size_t mostGraphs_ = 64;        // when there are more, those that keep nothing are forgotten
  size_t limit_ = 0;              // bytes, on a device that has none of its own
  std::unordered_map<c10::Device, OnDevice> devices_;
  RoomStats stats_;
};

}  // namespace ebb
