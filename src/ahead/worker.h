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
#include <vector>

#include "ahead/graph_replay.h"
#include "ebb/ahead.h"
#include "graph/lookahead.h"

namespace ebb {

class Worker {
 public:
  explicit Worker(c10::Device device);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Backward has reached a graph; those in `before` come next. `expected`: it had been replayed
  // ahead, or was the last to be recorded. `stream`: backward's, if the device has streams.
  void reached(
      c10::ArrayRef<WeakGraph> before,
      bool expected,
      const AheadSettings& settings,
      std::optional<c10::Stream> stream);

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
  bool waitForWork();
  c10::intrusive_ptr<Graph> next();
  AheadEnd replay(Graph& graph);
  AheadEnd replayOnStream(Graph& graph);
  c10::Stream beside(c10::Stream compute, Graph& graph);

  const c10::Device device_;
  std::mutex mutex_;  // guards what follows, but for what is atomic
  std::condition_variable wake_;
  std::vector<WeakGraph> candidates_;  // that come next, in no order
  std::vector<WeakGraph> ahead_;       // replayed, and backward has not come yet
  AheadSettings settings_;             // when backward last reached a graph
  std::optional<c10::Stream> stream_;  // on which backward computes
  std::optional<c10::Stream> side_;    // beside it; the worker's own
  std::optional<c10::Stream> waited_;  // for which that has waited,
  uint64_t waitedAfter_ = 0;           // ... after so many closings of graphs
  bool sleeps_ = false;
  uint64_t seen_ = 0;  // of posts_, before the worker last looked for something to do
  std::atomic<uint64_t> posts_{0};  // how often there was something new
  std::atomic<bool> ends_{false};
  std::atomic<bool> running_{false};
  std::thread thread_;
};

// Replays that raised, and graphs that were left half way, in the whole process.
struct AheadFailures {
  std::atomic<uint64_t> failures{0};
  std::atomic<uint64_t> stopped{0};

  static AheadFailures& get();
};

}  // namespace ebb
