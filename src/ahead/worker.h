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

// Its members are many: what backward's threads and the worker's own share, and the life of that.
class Worker {
 public:
  // `forks`: none starts while there are some.
  Worker(c10::Device device, const std::atomic<uint32_t>& forks);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Backward has reached a graph; those in `before` come next. `expected`: something of it had been
  // replayed ahead.
  void reached(c10::ArrayRef<WeakGraph> before, bool expected, const AheadSettings& settings);

  // Waits for the recipe that is running.
  void stop();

  // Whether nothing is left to do for now.
  bool isIdle();

  bool isRunning() const {
    return running_.load();
  }

 private:
  void start();
  void loop();
  // False if the thread is to end. `atOnce`: sleeps, and does not spin first.
  bool waitForWork(bool atOnce);
  c10::intrusive_ptr<Graph> next();
  void leave(Graph& done, AheadState now);
  AheadEnd replay(Graph& graph);
  AheadEnd replayOnStream(Graph& graph);

  SideStream side_;   // only the thread uses it
  std::mutex mutex_;  // guards what follows, but for what is atomic
  std::condition_variable wake_;
  Upcoming upcoming_;
  AheadSettings settings_;  // as they were when backward last reached a graph
  bool sleeps_ = false;
  uint64_t seen_ = 0;               // of posts_, before the worker last looked for something to do
  std::atomic<uint64_t> posts_{0};  // how often there was something new
  std::atomic<bool> ends_{false};
  std::atomic<bool> running_{false};
  // The number of graphs that had been closed when an allocation last failed. Those graphs are left
  // to backward, since each failed allocation empties the allocator's cache.
  uint64_t outOfMemoryAfter_ = 0;
  std::mutex lifeMutex_;  // guards thread_; taken without the other one
  std::thread thread_;
  const std::atomic<uint32_t>& forks_;
};

}  // namespace ebb
