#include <torch/csrc/autograd/engine.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "allocator/in_use.h"
#include "graph/geometry.h"
#include "hooks/observer.h"
#include "plugins/ahead/recipe_scope.h"
#include "plugins/ahead/room.h"
#include "plugins/ahead/worker.h"
#include "record/retention.h"
#include "stream/capture.h"

namespace ebb {
namespace {

// Holds the settings of replays ahead, and one worker for each device.
class Ahead {
 public:
  static Ahead& get() {
    static const bool made = [] {
      current.store(new Ahead);
      ::pthread_atfork(&beforeFork, &inParent, &inChild);
      std::atexit(&endAhead);
      return true;
    }();
    (void)made;
    return *current.load(std::memory_order_acquire);
  }

  void configure(const AheadSettings& settings) {
    std::lock_guard<std::mutex> lock(mutex_);
    settings_ = settings;
    regions_.store(settings.regions);
    aheadBudget.limit = settings.limit;
  }

  AheadSettings settings() {
    std::lock_guard<std::mutex> lock(mutex_);
    return settings_;
  }

  size_t regions() const { return regions_.load(std::memory_order_relaxed); }

  bool isOn() const { return regions() != 0; }

  Worker& worker(c10::Device device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return workers_.try_emplace(device, forks_).first->second;
  }

  void end() {
    forks_.fetch_add(1);  // never decremented, so no worker starts again
    stop();
  }

  // Ends all threads. A thread starts again when it is needed.
  void stop() {
    for (Worker* worker : all()) {
      worker->stop();
    }
  }

  bool areIdle() { return std::ranges::all_of(all(), &Worker::isIdle); }

  uint64_t running() { return std::ranges::count_if(all(), &Worker::isRunning); }

 private:
  std::vector<Worker*> all() {
    std::vector<Worker*> found;
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [device, worker] : workers_) {
      found.push_back(&worker);
    }
    return found;
  }

  // Ends all workers before a fork. A lock that a worker holds at the fork would stay locked in the
  // child for ever. A worker starts again when it is needed.
  static void beforeFork() {
    get().forks_.fetch_add(1);
    if (get().running() != 0) {  // stop() would release the GIL in any case: see ahead.py
      get().stop();
    }
  }

  static void inParent() { get().forks_.fetch_sub(1); }

  // Gives the child a new Ahead. Another thread may have held a lock of the old Ahead at the fork,
  // and that thread does not exist in the child.
  static void inChild() {
    const Ahead& before = *current.load();
    auto* after = new Ahead;
    after->settings_ = before.settings_;
    after->regions_.store(before.regions_.load());
    current.store(after);
  }

  static inline std::atomic<Ahead*> current{nullptr};  // leaked: threads may outlive statics

  std::mutex mutex_;  // guards all members below
  AheadSettings settings_;
  std::atomic<size_t> regions_{0};  // settings_.regions, read without the lock
  std::atomic<uint32_t> forks_{0};  // forks about to happen, plus 1 at the end of the process
  std::unordered_map<c10::Device, Worker> workers_;
};

bool isInBackward() { return torch::autograd::get_current_node() != nullptr; }

// See Note [Writes under a replay ahead]
void checkInputs(const Graph& graph) {
  const std::string* reader = lookaheadOf(graph)->onArrival.readerOfWritten();
  TORCH_CHECK(
      reader == nullptr,
      "one of the variables needed for gradient computation has been modified by an inplace "
      "operation: ebb has recomputed ",
      reader != nullptr ? *reader : "", " in region '", graph.names.front(),
      "' ahead of backward, and one of its inputs was written after that. Move the write after "
      "backward, run all forwards that update this input (batch norm statistics, a momentum "
      "buffer) in one region, or give ",
      reader != nullptr ? *reader : "", " the decision SAVE.");
}

bool canBeReplayed(const WeakGraph& weak) {
  const auto graph = weak.lock();
  return graph && lookaheadOf(*graph) && !lookaheadOf(*graph)->asked.load();
}

void countArrival(const Lookahead& lookahead, AheadState before) {
  if (before == AheadState::Done) {
    lookahead.became(AheadFate::InTime);
  } else if (before == AheadState::Begun) {
    lookahead.became(AheadFate::Late);
  } else if (before == AheadState::Recorded && lookahead.holds.load()) {
    lookahead.became(AheadFate::Held);
  }
}

}  // namespace

void configureAhead(const AheadSettings& settings) {
  if (settings.regions > 0) {
    useCountingAllocator();
  }
  Ahead::get().configure(settings);
}

AheadSettings aheadSettings() { return Ahead::get().settings(); }

AheadStats aheadStats() {
  AheadStats stats;
  stats.regionsInTime = aheadCounts.of(AheadFate::InTime);
  stats.regionsLate = aheadCounts.of(AheadFate::Late);
  stats.regionsInVain = aheadCounts.of(AheadFate::InVain);
  stats.regionsHeld = aheadCounts.of(AheadFate::Held);
  stats.regionsStopped = aheadCounts.of(AheadFate::Stopped);
  stats.failures = aheadCounts.failures;
  stats.bytes = aheadBudget.taken;
  stats.mostBytes = aheadBudget.most;
  stats.workers = Ahead::get().running();
  return stats;
}

void stopAhead() { Ahead::get().stop(); }

void endAhead() { Ahead::get().end(); }

std::atomic<bool> replaysWhenClosed{false};

bool replaysAheadAreIdle() { return Ahead::get().areIdle(); }

namespace {

// Returns the graphs that backward may reach next; none if the program unpacks a saved tensor
// outside of backward, or if backward has arrived before. Sets `expected` to true if a replay ahead
// of `graph` has begun. Called under the graph's lock.
std::vector<WeakGraph> arrive(Graph& graph, bool& expected) {
  Lookahead& lookahead = *lookaheadOf(graph);
  if (lookahead.hasArrived()) {
    return {};
  }
  if (!isInBackward()) {
    checkInputs(graph);
    lookahead.asked.store(false);
    return {};
  }
  const AheadState state = lookahead.state.exchange(AheadState::Reached);
  countArrival(lookahead, state);
  lookahead.reached();
  graph.observers.tell(&BackwardEvents::arrives, lookahead.onArrival.cameBack);
  checkInputs(graph);  // may throw: then the next unpack checks again
  lookahead.state.store(AheadState::Checked);
  expected = state != AheadState::Recorded;
  return lookahead.earlier.next();
}

void arriveAt(Graph& graph) {
  lookaheadOf(graph)->asked.store(true);
  bool expected = false;
  std::vector<WeakGraph> before;
  c10::Device device = c10::kCPU;
  {
    const WithoutGil withoutGil;
    std::lock_guard<PythonMutex> lock(graph.mutex);
    before = arrive(graph, expected);
    device = lookaheadOf(graph)->device;
  }
  Ahead& ahead = Ahead::get();
  if (!ahead.isOn() || !isInBackward()) {
    return;
  }
  const bool isNext = std::any_of(before.begin(), before.end(), &canBeReplayed);
  if (isNext && !isCapturing(device)) {
    ahead.worker(device).reached(before, expected, ahead.regions());
  }
}

// See Note [Replays ahead of backward]
class AheadObserver final : public RegionEvents, public BackwardEvents {
 public:
  explicit AheadObserver(Lookahead& lookahead) : lookahead_(lookahead) {}

  ExtraPtr packed(Value& value, const at::Tensor& tensor, Retention retention) override {
    const bool isFirst = retention == Retention::Recomputed && value.uses().packed() == 1;
    if (isFirst && !lookahead_.hasArrived()) {
      lookahead_.wants(value, tensor.storage());
    }
    return {};
  }
  void readsResultOf(const WeakGraph& maker) override { lookahead_.reads(maker); }
  void willClose() override { lookahead_.close(); }
  void left(const c10::intrusive_ptr<Graph>& graph) override {
    Room::get().closed(graph);
    if (!replaysWhenClosed.load(std::memory_order_relaxed)) {
      return;
    }
    {
      std::lock_guard<PythonMutex> lock(graph->mutex);
      lookahead_.dropHeld();
    }
    Ahead& ahead = Ahead::get();
    const WeakGraph next(graph);
    ahead.worker(lookahead_.device).reached(next, false, ahead.regions());
  }
  // Releases the storages that are held for replays ahead, unless memory has room for them.
  void nextOpens(const c10::intrusive_ptr<Graph>& graph, Graph& next) override {
    if (Lookahead* after = lookaheadOf(next)) {
      after->earlier.previous = WeakGraph(graph);
    }
    if (lookahead_.holds.load() && !lookahead_.hasRoom) {
      const WithoutGil withoutGil;
      std::lock_guard<PythonMutex> lock(graph->mutex);
      lookahead_.dropHeld();
    }
  }
  void unpacks(Graph& graph) override {
    if (!lookahead_.hasArrived()) {
      arriveAt(graph);
    }
  }

 private:
  Lookahead& lookahead_;
};

void open(Graph& graph) {
  if (Room::get().isOn()) {
    Room::get().make();
  }
  const bool hasRoom = Room::get().isOn();
  if ((!Ahead::get().isOn() && !hasRoom) || graph.rules.onlyInBackward) {
    return;
  }
  static std::atomic<uint64_t> numbers{0};
  auto lookahead = c10::make_intrusive<Lookahead>(++numbers, graph.observers, hasRoom);
  graph.observers.add(std::make_unique<AheadObserver>(*lookahead));
  graph.extras.set(std::move(lookahead));
  Room::get().opened(c10::intrusive_ptr<Graph>::reclaim_copy(&graph));
}

// See Note [Hands on a storage]
void excludeStorageOf(const at::Tensor& tensor) {
  if (Ahead::get().isOn() && isRecordable(tensor)) {
    excludeFromAhead(tensor.storage(), Lookahead::closings());
  }
}

[[maybe_unused]] const bool isRegistered =
    observeGraphs(&open, Turn::Last) && callBeforeUnseenWrites(&excludeStorageOf);

}  // namespace

}  // namespace ebb
