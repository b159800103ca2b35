// What regions keep because there is room for it, though it can be made again.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include "ebb/ahead.h"
#include "graph/graph.h"
#include "graph/lookahead.h"
#include "memory/relief.h"

namespace ebb {

// Note [Kept while there is room]
// Nobody knows beforehand how much memory a step leaves. So everything may be recorded as to be
// made again, and be kept nevertheless: autograd finds it where eager would have it. When a region
// is entered and what is allocated, with what a region has kept at most so far, is more than the
// limit, then the earliest regions give up what they keep, and backward makes it again. The
// earliest, since backward comes to them last, when the others' memory is free. Nothing else is
// different: what is kept so is kept as in Note [Replays ahead of backward], without the limit that
// counts there.
// The same is done where an allocation fails, in a region or a replay: the earliest regions give up
// what they keep, the open ones last, and the limit is lower from then on. See Note [Allocations
// that fail].
class EBB_API Room {
 public:
  static Room& get();

  void setLimit(size_t nbytes) {
    limit_.store(nbytes);
  }
  size_t limit() const {
    return limit_.load();
  }
  bool isOn() const {
    return limit_.load(std::memory_order_relaxed) != 0;
  }

  // A graph that may keep something is recorded from now on; and no more.
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

  // The earliest that keeps something; null if none does.
  c10::intrusive_ptr<Graph> takeFirst();

  // All that may keep something, the earliest first, and those that are open last.
  std::vector<c10::intrusive_ptr<Graph>> all();

  size_t tighten(Shortage shortage);
  void count(size_t given);

  std::atomic<size_t> limit_{0};
  std::mutex mutex_;               // guards what follows
  std::deque<WeakGraph> graphs_;   // closed ones that keep something, the earliest first
  std::vector<WeakGraph> open_;    // that are being recorded
  size_t mostGraphs_ = 64;         // when there are more, those that keep nothing are forgotten
  size_t largest_ = 0;             // bytes that one has kept
  c10::Device device_{c10::kCPU};  // of the last
  RoomStats stats_;
};

}  // namespace ebb
