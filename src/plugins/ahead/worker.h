// The thread that replays ahead on one device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "ebb/ahead.h"
#include "plugins/ahead/graph_replay.h"
#include "plugins/ahead/lookahead.h"

namespace ebb {

// The side stream of one worker thread: see Note [Side streams].
class SideStream {
 public:
  explicit SideStream(c10::Device device) : device_(device) {}

  // Returns the side stream, after making it wait for all work that produced the inputs of `graph`.
  // `compute` is the stream on which `graph` was recorded, and backward will run. Called under the
  // graph's lock.
  c10::Stream after(c10::Stream compute, Graph& graph);

 private:
  const c10::Device device_;
  std::optional<c10::Stream> stream_;  // created when first needed
  std::optional<c10::Stream> waited_;  // the compute stream for which the side stream has waited
  uint64_t waitedAfter_ = 0;           // Lookahead::closings() at that time
};

// Weak references to graphs that backward may reach next, and to graphs already replayed ahead.
class Upcoming {
 public:
  // Strong references that the methods have taken. The caller drops them without a lock, since a
  // graph may die with its last reference.
  using Seen = std::vector<c10::intrusive_ptr<Graph>>;

  void add(c10::ArrayRef<WeakGraph> graphs) {
    candidates_.insert(candidates_.end(), graphs.begin(), graphs.end());
  }

  // Called when backward reaches another graph than expected.
  void forgetAhead() { ahead_.clear(); }

  // Takes the most recently recorded candidate, since autograd reaches that graph first, and adds
  // the graph to those replayed ahead. Null if there is no candidate, or if `most` graphs have been
  // replayed ahead already.
  c10::intrusive_ptr<Graph> take(size_t most, Seen& seen);

 private:
  std::vector<WeakGraph> candidates_;  // in no order
  std::vector<WeakGraph> ahead_;       // replayed, not reached by backward yet
};

// New work rings the bell of a worker's thread. The thread calls listen() before it looks for work,
// so no ring is lost between the look and wait().
class Bell {
 public:
  void ring() {
    std::lock_guard<std::mutex> lock(mutex_);
    rings_.fetch_add(1);
    if (sleeps_) {
      wake_.notify_one();
    }
  }

  // Tells the thread to end. Call begin() before a new thread starts.
  void end() {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_.store(true);
    wake_.notify_one();
  }
  void begin() { ends_.store(false); }
  const std::atomic<bool>& ends() const { return ends_; }

  void listen() {
    std::lock_guard<std::mutex> lock(mutex_);
    heard_ = rings_.load();
  }

  // Waits until the bell has rung since listen(). Returns false if the thread is to end. `atOnce`:
  // sleep without spinning first.
  bool wait(bool atOnce);

  // True if the thread sleeps and has looked for work after the last ring.
  bool isSilent() {
    std::lock_guard<std::mutex> lock(mutex_);
    return sleeps_ && rings_.load() == heard_;
  }

 private:
  std::mutex mutex_;  // guards all members below, except atomics
  std::condition_variable wake_;
  bool sleeps_ = false;
  std::atomic<uint64_t> rings_{0};
  uint64_t heard_ = 0;  // rings before the last listen()
  std::atomic<bool> ends_{false};
};

// The thread that replays one device's graphs ahead of backward, and the state that it shares with
// backward's threads.
class Worker {
 public:
  // `forks`: no thread starts while the number is not 0.
  Worker(c10::Device device, const std::atomic<uint32_t>& forks);
  ~Worker();

  // Backward has reached a graph; the graphs in `before` may come next. `expected`: the reached
  // graph had been replayed ahead, at least in part.
  void reached(c10::ArrayRef<WeakGraph> before, bool expected, const AheadSettings& settings);

  // Ends the thread, after the recipe that is running.
  void stop();

  // True if there is nothing to do for now.
  bool isIdle();

  bool isRunning() const { return running_.load(); }

 private:
  void start();
  void loop();
  c10::intrusive_ptr<Graph> next();
  void leave(Graph& done, AheadState now);
  AheadEnd replay(Graph& graph);
  AheadEnd replayOnStream(Graph& graph);

  SideStream side_;  // used by the thread only
  // Used by the thread only: the number of closed graphs when a replay last failed. The worker
  // leaves all of those graphs to backward. The likely cause is that memory is short, and each
  // allocation that fails empties the allocator's cache.
  uint64_t failedAfter_ = 0;
  Bell bell_;
  std::atomic<bool> running_{false};
  std::mutex mutex_;  // guards upcoming_ and settings_
  Upcoming upcoming_;
  AheadSettings settings_;  // as of the last time backward reached a graph
  std::mutex lifeMutex_;    // guards thread_; never taken while mutex_ is held
  std::thread thread_;
  const std::atomic<uint32_t>& forks_;
};

}  // namespace ebb
