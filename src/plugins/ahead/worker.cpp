#include "plugins/ahead/worker.h"

#include <ATen/Context.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <chrono>
#include <system_error>
#include <utility>

#include "stream/stream.h"

namespace ebb {
namespace {

// Suppresses the warnings of replays, since the forward has already given the same warnings.
class Silent final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// The time for which the worker spins before it sleeps. Waking a thread takes longer than a small
// region's backward.
constexpr auto kSpin = std::chrono::microseconds(200);

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

bool canBegin(const Graph& graph) {
  return lookaheadOf(graph) && lookaheadOf(graph)->state.load() == AheadState::Recorded;
}

bool isAhead(const Graph& graph) { return !lookaheadOf(graph)->asked.load(); }

}  // namespace

c10::intrusive_ptr<Graph> Upcoming::take(size_t most) {
  c10::intrusive_ptr<Graph> latest;
  std::erase_if(candidates_, [&](const WeakGraph& weak) {
    auto graph = weak.lock();
    const bool stays = graph && canBegin(*graph);
    if (stays && (!latest || lookaheadOf(*latest)->number < lookaheadOf(*graph)->number)) {
      latest = std::move(graph);
    }
    return !stays;
  });
  std::erase_if(ahead_, [](const WeakGraph& weak) {
    const auto graph = weak.lock();
    return !graph || !isAhead(*graph);
  });
  if (!latest || ahead_.size() >= most) {
    return {};
  }
  auto recorded = AheadState::Recorded;
  if (!lookaheadOf(*latest)->state.compare_exchange_strong(recorded, AheadState::Begun)) {
    return {};  // backward has just arrived
  }
  ahead_.emplace_back(latest);
  return latest;
}

void Worker::reached(c10::ArrayRef<WeakGraph> before, bool expected, size_t most) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    posted_.graphs.insert(posted_.graphs.end(), before.begin(), before.end());
    posted_.isElsewhere |= !expected;
    posted_.most = most;
  }
  ring();
  if (!running_.load()) {
    start();
  }
}

void Worker::ring() {
  rings_.fetch_add(1);
  rings_.notify_one();
}

// Waits until `rings_` differs from `heard`. `atOnce`: sleeps without spinning first.
void Worker::wait(uint32_t heard, bool atOnce) {
  idleSince_.store(heard);
  const auto until = std::chrono::steady_clock::now() + (atOnce ? std::chrono::seconds(0) : kSpin);
  while (rings_.load() == heard && std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < 32; ++i) {
      relax();
    }
  }
  rings_.wait(heard);
}

void Worker::start() {
  const WithoutGil withoutGil;
  std::lock_guard<std::mutex> life(lifeMutex_);
  if (running_.load() || forks_.load() != 0) {
    return;
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  ends_.store(false);
  running_.store(true);
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error&) {  // too many threads: backward does all the work
    running_.store(false);
    ++aheadCounts.failures;
  }
}

void Worker::stop() {
  const WithoutGil withoutGil;
  std::lock_guard<std::mutex> life(lifeMutex_);
  ends_.store(true);
  ring();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Worker::loop() {
  at::globalContext().setFlushDenormal(false);  // a new thread inherits its creator's setting
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  const auto leave = c10::make_scope_exit([&] { running_.store(false); });
  AheadEnd last = AheadEnd::Done;
  // `heard` is read before the thread looks for work and for its end, so no ring is lost.
  for (uint32_t heard = rings_.load(); !ends_.load(); heard = rings_.load()) {
    if (const auto graph = next()) {
      last = replay(*graph);
    } else {
      wait(heard, last == AheadEnd::Stopped);
    }
  }
}

c10::intrusive_ptr<Graph> Worker::next() {
  size_t most = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    upcoming_.add(std::exchange(posted_.graphs, {}));
    if (std::exchange(posted_.isElsewhere, false)) {
      upcoming_.forgetAhead();
    }
    most = posted_.most;
  }
  return upcoming_.take(most);
}

AheadEnd Worker::replay(Graph& graph) {
  AheadEnd end = AheadEnd::Stopped;
  try {
    if (lookaheadOf(graph)->closed > failedAfter_) {
      end = replayOnStream(graph);
    }
  } catch (const std::exception&) {
    ++aheadCounts.failures;  // backward meets the same error and reports it
    failedAfter_ = Lookahead::closings();
  }
  if (end == AheadEnd::Stopped) {
    lookaheadOf(graph)->became(AheadFate::Stopped);
  }
  leave(
      graph, end == AheadEnd::Done    ? AheadState::Done
             : end == AheadEnd::Asked ? AheadState::Begun
                                      : AheadState::Stopped);
  return end;
}

// Sets the state of a graph whose replay ahead has ended. After a complete replay, the graphs that
// backward may reach after `done` become candidates.
void Worker::leave(Graph& done, AheadState now) {
  auto begun = AheadState::Begun;
  lookaheadOf(done)->state.compare_exchange_strong(begun, now);
  if (now != AheadState::Done) {
    return;
  }
  std::lock_guard<PythonMutex> lock(done.mutex);
  upcoming_.add(lookaheadOf(done)->earlier.next());
}

// Replays on the graph's own stream, where backward will run. A graph on several streams is left to
// backward.
AheadEnd Worker::replayOnStream(Graph& graph) const {
  std::optional<c10::StreamGuard> guard;
  {
    std::lock_guard<PythonMutex> lock(graph.mutex);
    if (graph.streams.count() > 1) {
      return AheadEnd::Stopped;
    }
    if (graph.streams.count() == 1) {
      guard.emplace(graph.streams.first());
    }
  }
  return GraphReplay(graph, ends_).run();
}

}  // namespace ebb
