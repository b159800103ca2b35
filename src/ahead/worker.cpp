#include "ahead/worker.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <chrono>

namespace ebb {
namespace {

// A replay that backward asked for has given these warnings, and will again if it is asked for.
class Silent final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {
  }
};

// Waking a thread takes longer than a small region's backward.
constexpr auto kSpin = std::chrono::microseconds(200);

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

bool canBegin(const Graph& graph) {
  return graph.lookahead && graph.lookahead->state.load() == AheadState::Recorded &&
         !graph.lookahead->asked.load();
}

}  // namespace

AheadFailures& AheadFailures::get() {
  static auto* instance = new AheadFailures;
  return *instance;
}

Worker::Worker(c10::Device device) : device_(device) {
}

Worker::~Worker() {
  stop();
}

void Worker::reached(
    c10::ArrayRef<WeakGraph> before,
    bool expected,
    const AheadSettings& settings,
    std::optional<c10::Stream> stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!expected) {
    ahead_.clear();  // backward goes another way
  }
  candidates_.insert(candidates_.end(), before.begin(), before.end());
  settings_ = settings;
  stream_ = stream;
  posts_.fetch_add(1);
  if (!running_.load()) {
    start();
  } else if (sleeps_) {
    wake_.notify_one();
  }
}

void Worker::start() {
  if (thread_.joinable()) {
    thread_.join();  // it has ended, or is about to, without the lock
  }
  ends_.store(false);
  running_.store(true);
  thread_ = std::thread([this] { loop(); });
}

void Worker::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ends_.store(true);
    wake_.notify_one();
  }
  if (thread_.joinable()) {
    const WithoutGil withoutGil;
    thread_.join();
  }
}

void Worker::loop() {
  Silent silent;
  const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  const auto leave = c10::make_scope_exit([&] { running_.store(false); });
  while (!ends_.load()) {
    const auto graph = next();
    if (!graph) {
      if (!waitForWork()) {
        return;
      }
      continue;
    }
    if (replay(*graph) == AheadEnd::Threads) {
      return;  // a new thread begins with the number that the program has set since
    }
  }
}

bool Worker::isIdle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return !running_.load() || (sleeps_ && posts_.load() == seen_);
}

bool Worker::waitForWork() {
  const uint64_t seen = seen_;  // which only this thread sets
  const auto until = std::chrono::steady_clock::now() + kSpin;
  while (posts_.load() == seen && !ends_.load() && std::chrono::steady_clock::now() < until) {
    for (int i = 0; i < 32; ++i) {
      relax();
    }
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleeps_ = true;
  wake_.wait(lock, [&] { return posts_.load() != seen || ends_.load(); });
  sleeps_ = false;
  return !ends_.load();
}

// The graph that backward will reach next; null if it is far enough ahead.
c10::intrusive_ptr<Graph> Worker::next() {
  std::vector<c10::intrusive_ptr<Graph>> seen;  // no graph dies under the lock
  std::lock_guard<std::mutex> lock(mutex_);
  seen_ = posts_.load();
  const auto forget = [&](std::vector<WeakGraph>& all, const auto& stays) {
    const auto goes = [&](const WeakGraph& weak) {
      const auto graph = seen.emplace_back(weak.lock());
      return !graph || !stays(*graph);
    };
    all.erase(std::remove_if(all.begin(), all.end(), goes), all.end());
  };
  forget(ahead_, [](const Graph& graph) { return !graph.lookahead->asked.load(); });
  const size_t candidatesFrom = seen.size();
  forget(candidates_, &canBegin);
  if (candidates_.empty() || ahead_.size() >= settings_.regions) {
    return {};
  }
  c10::intrusive_ptr<Graph> latest;
  for (size_t i = candidatesFrom; i < seen.size(); ++i) {
    const auto& graph = seen[i];
    const bool later = graph && canBegin(*graph) &&
                       (!latest || latest->lookahead->number < graph->lookahead->number);
    latest = later ? graph : latest;
  }
  if (!latest) {
    return {};
  }
  latest->lookahead->state.store(AheadState::Begun);
  ahead_.emplace_back(latest);
  return latest;
}

AheadEnd Worker::replay(Graph& graph) {
  AheadEnd end = AheadEnd::Stopped;
  try {
    end = replayOnStream(graph);
  } catch (const std::exception&) {
    ++AheadFailures::get().failures;  // backward meets it again, and tells
  }
  if (end == AheadEnd::Stopped || end == AheadEnd::Threads) {
    ++AheadFailures::get().stopped;
  }
  auto begun = AheadState::Begun;
  if (end == AheadEnd::Done) {
    graph.lookahead->state.compare_exchange_strong(begun, AheadState::Done);
    std::lock_guard<PythonMutex> lockGraph(graph.mutex);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto& before = graph.lookahead->before;
    candidates_.insert(candidates_.end(), before.begin(), before.end());
  }
  return end;
}

AheadEnd Worker::replayOnStream(Graph& graph) {
  std::optional<c10::Stream> stream;
  AheadSettings settings;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stream = stream_;
    settings = settings_;
  }
  std::optional<c10::StreamGuard> guard;
  if (stream) {
    guard.emplace(settings.sideStream ? beside(*stream, graph) : *stream);
  }
  return GraphReplay(graph, ends_, settings.busyCores).run();
}

// See Note [Side streams]
c10::Stream Worker::beside(c10::Stream compute, Graph& graph) {
  const c10::impl::VirtualGuardImpl guard(device_.type());
  if (!side_) {
    side_ = guard.getStreamFromGlobalPool(compute.device());
  }
  std::lock_guard<PythonMutex> lock(graph.mutex);
  if (waited_ != compute || graph.lookahead->closed > waitedAfter_) {
    waited_ = compute;
    waitedAfter_ = Lookahead::closings();
    c10::Event soFar(compute.device_type());
    soFar.record(compute);
    soFar.block(*side_);
  }
  graph.lookahead->side = *side_;
  return *side_;
}

}  // namespace ebb
