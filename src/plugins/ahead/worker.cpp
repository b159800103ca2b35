#include "plugins/ahead/worker.h"

#include <ATen/Context.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <chrono>
#include <system_error>

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
  return lookaheadOf(graph) && lookaheadOf(graph)->state.load() == AheadState::Recorded &&
         !lookaheadOf(graph)->asked.load();
}

bool isAhead(const Graph& graph) { return !lookaheadOf(graph)->asked.load(); }

// Removes graphs that no longer exist or for which `stays` is false.
void keepOnly(std::vector<WeakGraph>& graphs, bool (*stays)(const Graph&), Upcoming::Seen& seen) {
  std::erase_if(graphs, [&](const WeakGraph& weak) {
    seen.push_back(weak.lock());
    return !seen.back() || !stays(*seen.back());
  });
}

bool isBefore(const WeakGraph& a, const WeakGraph& b) {
  return lookaheadOf(*a.lock())->number < lookaheadOf(*b.lock())->number;
}

}  // namespace

c10::intrusive_ptr<Graph> Upcoming::take(size_t most, Seen& seen) {
  keepOnly(ahead_, &isAhead, seen);
  keepOnly(candidates_, &canBegin, seen);
  if (candidates_.empty() || ahead_.size() >= most) {
    return {};
  }
  auto latest = std::max_element(candidates_.begin(), candidates_.end(), &isBefore)->lock();
  auto recorded = AheadState::Recorded;
  if (!lookaheadOf(*latest)->state.compare_exchange_strong(recorded, AheadState::Begun)) {
    return {};  // backward has just arrived
  }
  ahead_.emplace_back(latest);
  return latest;
}

c10::Stream SideStream::after(c10::Stream compute, Graph& graph) {
  if (!stream_) {
    stream_ = streamFromPool(device_, /*isHighPriority=*/false);
  }
  if (waited_ != compute || lookaheadOf(graph)->closed > waitedAfter_) {
    waited_ = compute;
    waitedAfter_ = Lookahead::closings();
    orderAfter(*stream_, compute);
  }
  lookaheadOf(graph)->onArrival.side = *stream_;
  return *stream_;
}

bool Bell::wait(bool atOnce) {
  const auto isOver = [&] { return rings_.load() != heard_ || ends_.load(); };
  const auto until = std::chrono::steady_clock::now() + (atOnce ? std::chrono::seconds(0) : kSpin);
  while (!isOver() && std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < 32; ++i) {
      relax();
    }
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleeps_ = true;
  wake_.wait(lock, isOver);
  sleeps_ = false;
  return !ends_.load();
}

Worker::Worker(c10::Device device, const std::atomic<uint32_t>& forks)
    : side_(device), forks_(forks) {}

Worker::~Worker() { stop(); }

void Worker::reached(
    c10::ArrayRef<WeakGraph> before, bool expected, const AheadSettings& settings) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!expected) {
      upcoming_.forgetAhead();
    }
    upcoming_.add(before);
    settings_ = settings;
  }
  bell_.ring();
  if (!running_.load()) {
    start();
  }
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
  bell_.begin();
  running_.store(true);
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error&) {  // too many threads: backward does all the work
    running_.store(false);
    ++AheadCounts::get().failures;
  }
}

void Worker::stop() {
  const WithoutGil withoutGil;
  std::lock_guard<std::mutex> life(lifeMutex_);
  bell_.end();
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
  while (!bell_.ends()) {
    if (const auto graph = next()) {
      last = replay(*graph);
      if (last == AheadEnd::Threads) {
        return;  // a new thread starts with the program's number of intra-op threads
      }
    } else if (!bell_.wait(last == AheadEnd::Stopped)) {
      return;
    }
  }
}

bool Worker::isIdle() { return !running_.load() || bell_.isSilent(); }

c10::intrusive_ptr<Graph> Worker::next() {
  Upcoming::Seen seen;
  bell_.listen();
  std::lock_guard<std::mutex> lock(mutex_);
  return upcoming_.take(settings_.regions, seen);
}

AheadEnd Worker::replay(Graph& graph) {
  AheadEnd end = AheadEnd::Stopped;
  try {
    if (lookaheadOf(graph)->closed > failedAfter_) {
      end = replayOnStream(graph);
    }
  } catch (const std::exception&) {
    ++AheadCounts::get().failures;  // backward meets the same error and reports it
    failedAfter_ = Lookahead::closings();
  }
  if (end == AheadEnd::Stopped || end == AheadEnd::Threads) {
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
  std::lock_guard<PythonMutex> lockGraph(done.mutex);
  std::lock_guard<std::mutex> lock(mutex_);
  upcoming_.add(lookaheadOf(done)->earlier.next());
}

AheadEnd Worker::replayOnStream(Graph& graph) {
  AheadSettings settings;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    settings = settings_;
  }
  std::optional<c10::StreamGuard> guard;
  {
    std::lock_guard<PythonMutex> lock(graph.mutex);
    // Made after the lock is taken, to avoid a deadlock: a replay of backward holds the lock while
    // its ProcessStateChange waits for the end of each AheadRecipeScope.
    const AheadRecipeScope scope;
    if (!scope.holds() || graph.streams.count() > 1) {
      return AheadEnd::Stopped;
    }
    if (graph.streams.count() == 1) {
      const c10::Stream own = graph.streams.first();
      guard.emplace(settings.sideStream ? side_.after(own, graph) : own);
    }
  }
  return GraphReplay(graph, bell_.ends()).run();
}

}  // namespace ebb
