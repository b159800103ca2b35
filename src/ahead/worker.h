// The thread that replays ahead on one device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>

#include "ahead/graph_replay.h"
#include "ahead/side_stream.h"
#include "ahead/upcoming.h"
#include "ebb/ahead.h"
#include "graph/lookahead.h"

namespace ebb {

// The thread that replays one device's graphs ahead of backward, and the state that it shares with
// backward's threads. Worker has many members: these two belong together.
class Worker {
 public:
  // `forks`: no thread starts while the number is not 0.
  Worker(c10::Device device, const std::atomic<uint32_t>& forks);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Backward has reached a graph; the graphs in `before` may come next. `expected`: the reached
  // graph had been replayed ahead, at least in part.
  void reached(c10::ArrayRef<WeakGraph> before, bool expected, const AheadSettings& settings);

  // Ends the thread, after the recipe that is running.
  void stop();

  // True if there is nothing to do for now.
  bool isIdle();

  bool isRunning() const {
    return running_.load();
  }

 private:
  void start();
  void loop();
  // Returns false if the thread is to end. `atOnce`: sleep without spinning first.
  bool waitForWork(bool atOnce);
  c10::intrusive_ptr<Graph> next();
  void leave(Graph& done, AheadState now);
  AheadEnd replay(Graph& graph);
  AheadEnd replayOnStream(Graph& graph);

  SideStream side_;   // used by the thread only
  std::mutex mutex_;  // guards all members below, except atomics
  std::condition_variable wake_;
  Upcoming upcoming_;
  AheadSettings settings_;  // as of the last time backward reached a graph
  bool sleeps_ = false;
  uint64_t seen_ = 0;               // value of posts_ when the worker last looked for work
  std::atomic<uint64_t> posts_{0};  // number of times that new work arrived
  std::atomic<bool> ends_{false};
  std::atomic<bool> running_{false};
  // The number of closed graphs when an allocation last failed. The worker leaves all of those
  // graphs to backward, since each failed allocation empties the allocator's cache.
  uint64_t outOfMemoryAfter_ = 0;
  std::mutex lifeMutex_;  // guards thread_; never taken while mutex_ is held
  std::thread thread_;
  const std::atomic<uint32_t>& forks_;
};

}  // namespace ebb
