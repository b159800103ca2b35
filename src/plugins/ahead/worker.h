// The thread that replays ahead on one device.
#pragma once

#include <c10/util/ArrayRef.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "plugins/ahead/graph_replay.h"
#include "plugins/ahead/lookahead.h"

namespace ebb {

// Weak references to graphs that backward may reach next, and to graphs already replayed ahead.
class Upcoming {
 public:
  void add(c10::ArrayRef<WeakGraph> graphs) {
    candidates_.insert(candidates_.end(), graphs.begin(), graphs.end());
  }

  // Called when backward has reached another graph than expected.
  void forgetAhead() { ahead_.clear(); }

  // Takes the most recently recorded candidate, since autograd reaches that graph first, and adds
  // the graph to those replayed ahead. Null if there is no candidate, or if `most` graphs have been
  // replayed ahead already.
  c10::intrusive_ptr<Graph> take(size_t most);

 private:
  std::vector<WeakGraph> candidates_;  // in no order
  std::vector<WeakGraph> ahead_;       // replayed, not reached by backward yet
};

// The thread that replays one device's graphs ahead of backward, and the state that it shares with
// backward's threads.
class Worker {
 public:
  // `forks`: no thread starts while the number is not 0.
  explicit Worker(const std::atomic<uint32_t>& forks) : forks_(forks) {}

  // Backward has reached a graph; the graphs in `before` may come next. `expected`: the reached
  // graph had been replayed ahead, at least in part. `most`: AheadSettings::regions.
  void reached(c10::ArrayRef<WeakGraph> before, bool expected, size_t most);

  // Ends the thread, after the recipe that is running.
  void stop();

  // True if there is nothing to do for now.
  bool isIdle() const { return !running_.load() || idleSince_.load() == rings_.load(); }

  bool isRunning() const { return running_.load(); }

 private:
  // Messages from the threads of backward to the worker's thread.
  struct Post {
    std::vector<WeakGraph> graphs;  // backward may reach them next
    bool isElsewhere = false;       // backward has reached another graph than expected
    size_t most = 0;                // as of the last time backward reached a graph
  };

  void start();
  void ring();
  void loop();
  void wait(uint32_t heard, bool atOnce);
  c10::intrusive_ptr<Graph> next();
  void leave(Graph& done, AheadState now);
  AheadEnd replay(Graph& graph);
  AheadEnd replayOnStream(Graph& graph) const;

  // Used by the thread only:
  Upcoming upcoming_;
  // The number of closed graphs when a replay last failed. The worker leaves all of those graphs to
  // backward. The likely cause is that memory is short, and each allocation that fails empties the
  // allocator's cache.
  uint64_t failedAfter_ = 0;

  std::atomic<uint32_t> rings_{0};      // new work, or the end of the thread, increments it
  std::atomic<uint32_t> idleSince_{0};  // `rings_` when the thread last found nothing to do
  std::atomic<bool> ends_{false};       // the thread is to end
  std::atomic<bool> running_{false};
  std::mutex mutex_;  // guards posted_
  Post posted_;
  std::mutex lifeMutex_;  // guards thread_; never taken while mutex_ is held
  std::thread thread_;
  const std::atomic<uint32_t>& forks_;
};

}  // namespace ebb
