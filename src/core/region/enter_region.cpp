#include "region/enter_region.h"

#include <ATen/SavedTensorHooks.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/Synchronized.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <set>

#include "counts/statistics.h"
#include "ebb/region.h"
#include "graph/recipe.h"
#include "intercept/in_transit.h"
#include "intercept/install.h"
#include "record/recorder.h"
#include "saved/handle.h"
#include "support/thread_owned.h"
#include "torch_seams/engine.h"

namespace ebb {
namespace {

// One open region.
struct Frame {
  uint64_t id;                       // identifies the frame
  Repeats repeats;                   // inner frames inherit the value
  std::string name;                  // for messages and reports
  uint16_t region;                   // index of `name` in Graph::names
  uint32_t nested;                   // see Recipe::nested
  std::unique_ptr<Decider> decider;  // decides on the ops of this frame
  size_t hooks;                      // number of Python saved-tensor hooks on the stack at entry
  RegionNotes notes;                 // of observers
  RegionCounters counters{};         // added to the statistics when the frame ends
};

size_t hookDepth() { return at::SavedTensorDefaultHooks::get_tls_state().stack.size(); }

// True if this thread runs under a tracer that identifies tensors by object. Such a tracer would
// record each tensor that a handle unpacks as a constant. The tracer was started inside the region,
// because ebb's Python code does not enter a region during a trace.
bool isTraced() {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PreDispatch) ||
         (TorchDispatchModeTLS::any_modes_set() &&
          TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY).has_value());
}

// Ids of frames that another thread tried to leave. The thread that entered such a frame drops the
// frame when the thread next enters a region.
c10::Synchronized<std::set<uint64_t>>& abandoned() {
  static auto* ids = new c10::Synchronized<std::set<uint64_t>>;
  return *ids;
}

// True if abandoned() is not empty. Nested regions read it on entry, without the lock.
std::atomic<bool> anyAbandoned{false};

std::unique_ptr<torch::autograd::SavedVariableHooks> newHandleOfThread();

// Note [Python while a region closes]
// When a region closes, ebb drops tensors, which may run finalizers of the program, and logs, which
// runs handlers of the program. This code may compute, run a backward, or enter and leave regions.
// So the thread leaves the region before the graph closes: ebb takes the frames off and removes the
// interceptor. A thread is inside a region exactly while it has an interceptor (openRecorder()).
// The recorder still works for the closing graph. So a region that is entered meanwhile does
// nothing: its operators run as in eager. ebb logs last, when the thread can enter regions again.

// `flag` is true until the result dies.
[[nodiscard]] auto raise(bool& flag) {
  flag = true;
  return c10::make_scope_exit([&flag] { flag = false; });
}

// The id of an entry that does nothing.
constexpr uint64_t kNoRegion = std::numeric_limits<uint64_t>::max();

// Note [Parts of a region]
// Backward recomputes a region as a whole. FSDP frees the parameters of a unit after the unit's
// forward, and gathers them again just before the unit's backward. If a region contained two such
// units, backward would need the parameters of both at once. So if a job of several ranks empties a
// storage that ebb has read in the open region and has not computed there, the next op or pack
// begins another part of the region, which backward recomputes apart from the first. A region with
// only one unit ends before that, and has one part. escapes="placeholder" affects only the last
// part.
//
// The open regions of one thread, and the thread's interceptor while another part is due.
class ThreadRegions final : public Interceptor {
 public:
  ~ThreadRegions() {
    try {
      closeDownTo(0);
    } catch (const std::exception& error) {
      TORCH_WARN(error.what());  // at the thread's end, nothing could catch it
    }
  }

  // Begins an outermost region, or the next part of one.
  void openGraph() {
    const auto over = raise(isBusy_);
    statisticsRegionEntered();
    count(liveCounts().regions, 1);
    auto graph = c10::make_intrusive<Graph>();
    addObservers(*graph);
    if (const auto last = std::exchange(last_, WeakGraph(graph)).lock()) {
      last->observers.tell(&RegionEvents::nextOpens, last, *graph);
    }
    recorder_.open(std::move(graph));
  }

  uint64_t enter(const PolicyPtr& policy, std::string name, Repeats repeats) {
    if (isBusy_) {
      return kNoRegion;  // see Note [Python while a region closes]
    }
    auto decider = policy->activate();  // first, because it may throw
    prepareToEnter();
    static std::atomic<uint64_t> lastId{0};
    const uint64_t id = ++lastId;
    Graph& graph = *recorder_.context().graph;
    auto notes = graph.observers.enter(name, policy);
    const uint16_t region = graph.names.indexOf(name);
    if (!frames_.empty() && frames_.back().repeats == Repeats::All) {
      repeats = Repeats::All;
    }
    constexpr uint64_t kMostNested = (1 << Recipe::kNestedBits) - 1;
    const uint32_t nested = frames_.empty() ? 0 : static_cast<uint32_t>(1 + id % kMostNested);
    frames_.push_back(
        {id, repeats, std::move(name), region, nested, std::move(decider), hookDepth(),
         std::move(notes)});
    frames_.back().counters.entered = 1;
    activate();
    if (frames_.size() == 1) {
      announceOpaqueWrites();
    }
    return id;
  }

  void storageEmptied(c10::StorageImpl* storage) {
    if (openRecorder() && recorder_.storageEmptied(storage)) {
      partIsDue_ = true;
      activate();
    }
  }

  void call(Call& call) override {
    beginPart();
    recorder_.call(call);
  }
  void aliased(const at::Tensor& tensor, const at::Tensor& result) override {
    recorder_.aliased(tensor, result);
  }
  Interceptor& recorder() override { return recorder_; }

  // See Note [Parts of a region]
  void beginPart() {
    std::deque<Frame> open;
    frames_.swap(open);
    const auto begin = [&] {
      openGraph();
      frames_.swap(open);
      for (Frame& frame : frames_) {
        frame.region = recorder_.context().graph->names.indexOf(frame.name);
      }
      activate();
      announceOpaqueWrites();
    };
    try {
      closeGraph(true);
    } catch (...) {
      begin();  // the frames are still open, and need a graph
      throw;
    }
    begin();
  }

  void leave(uint64_t id) {
    if (id == kNoRegion) {
      return;
    }
    size_t depth = frames_.size();
    while (depth > 0 && frames_[depth - 1].id != id) {
      --depth;
    }
    if (depth == 0) {
      abandoned().withLock([id](auto& ids) {
        ids.insert(id);
        anyAbandoned = true;
      });
      TORCH_CHECK(
          false,
          "ebb: a region was left on another thread than the one that entered it, or after a "
          "region around it. Use with-blocks within one thread; that thread closes the region when "
          "it next enters one.");
    }
    const size_t open = frames_.size() - depth;
    const std::string inner = open > 0 ? frames_.back().name : "";
    closeDownTo(depth - 1);
    TORCH_CHECK(
        open == 0, "ebb: regions must be left in the reverse order of entering: region '", inner,
        "' was still open. It has been closed too.");
  }

  Recorder* recorderThatEndsWith(uint64_t id) {
    const bool isOutermost = frames_.size() == 1 && frames_.front().id == id;
    return isOutermost && opaque_.empty() ? &recorder_ : nullptr;
  }

  void opaqueWriteBegins(const at::Tensor& tensor) {
    beforeUnseenWrite(tensor);
    opaque_.push_back(tensor);
    if (openRecorder()) {
      recorder_.opaqueWriteBegins(tensor);
    }
  }

  void opaqueWriteEnds(const at::Tensor& tensor) {
    const auto same = [&](const at::Tensor& open) { return open.is_same(tensor); };
    const auto open = std::find_if(opaque_.begin(), opaque_.end(), same);
    if (open != opaque_.end()) {  // else the write has begun on another thread
      opaque_.erase(open);
    }
    if (openRecorder()) {
      recorder_.opaqueWriteEnds(tensor);
    } else {
      moveVersionIfNeeded(tensor);
    }
  }

  // A handle for the tensor that autograd is about to save. Null outside of regions, and if the
  // program has pushed Python saved-tensor hooks since entry.
  std::unique_ptr<Handle> newHandle() {
    if (!openRecorder() || frames_.back().hooks != hookDepth() || isTraced()) {
      return nullptr;
    }
    if (partIsDue_) {
      beginPart();  // an op's inputs are packed before the op is called
    }
    return std::make_unique<Handle>();
  }

 private:
  void prepareToEnter() {
    dropAbandoned();
    installInterception();
    watchCollectives(&moveVersionOfComputed);
    installEngine(&newHandleOfThread);
    if (frames_.empty()) {
      openGraph();
    }
  }

  // Ends the outermost region, or the part of one, that openGraph() began. The caller has taken the
  // frames off: see Note [Python while a region closes].
  void closeGraph(bool onlyPart) {
    const auto over = raise(isBusy_);
    partIsDue_ = false;
    setCurrentInterceptor(nullptr);
    count(liveCounts().regions, -1);
    const auto graph = recorder_.context().graph;
    recorder_.close(onlyPart);
    graph->observers.tell(&RegionEvents::left, graph);
  }

  void announceOpaqueWrites() {
    for (const at::Tensor& tensor : opaque_) {
      recorder_.opaqueWriteBegins(tensor);
    }
  }

  void dropAbandoned() {
    for (size_t depth = 0; depth < frames_.size() && anyAbandoned; ++depth) {
      const bool isAbandoned = abandoned().withLock([&](auto& ids) {
        const bool found = ids.erase(frames_[depth].id) > 0;
        anyAbandoned = !ids.empty();
        return found;
      });
      if (isAbandoned) {
        closeDownTo(depth);
      }
    }
  }

  void closeDownTo(size_t depth) {
    while (frames_.size() > depth) {
      Frame frame = std::move(frames_.back());
      frames_.pop_back();
      const auto ended = c10::make_scope_exit([&] { statisticsAdd(frame.name, frame.counters); });
      if (!frames_.empty()) {
        activate();
      } else {
        attach(frame);  // work from here on counts for the outermost region
        closeGraph(false);
      }
    }
  }

  // The recorder works for `frame` from now on, and refers to its members.
  void attach(Frame& frame) {
    recorder_.workFor(
        *frame.decider, frame.counters, frame.region, frame.nested, frame.repeats == Repeats::All,
        frames_.empty() ? frame.notes : frames_.front().notes);
  }

  void activate() {
    attach(frames_.back());
    setCurrentInterceptor(partIsDue_ ? static_cast<Interceptor*>(this) : &recorder_);
  }

  std::deque<Frame> frames_;                     // innermost last; a deque keeps addresses valid
  WeakGraph last_{c10::intrusive_ptr<Graph>()};  // the graph opened last
  Recorder recorder_;               // of the outermost region; has a graph while one is open
  std::vector<at::Tensor> opaque_;  // open opaque writes of this thread
  bool partIsDue_ = false;  // the next op or pack begins a part: see Note [Parts of a region]
  bool isBusy_ = false;     // a graph is being opened or closed: enter() does nothing
};

// See Note [Static TLS]
[[gnu::tls_model("initial-exec")]] constinit thread_local ThreadRegions* tlsRegions = nullptr;

ThreadRegions& threadRegions() { return threadOwned(tlsRegions); }

std::unique_ptr<torch::autograd::SavedVariableHooks> newHandleOfThread() {
  return threadRegions().newHandle();
}

}  // namespace

Region::Region(PolicyPtr policy, std::string name) : id_(enterRegion(policy, std::move(name))) {}

Region::~Region() {
  try {
    leaveRegion(id_);
  } catch (const c10::Error& error) {
    TORCH_WARN(error.what_without_backtrace());  // a destructor must not throw
  }
}

uint64_t enterRegion(const PolicyPtr& policy, std::string name, Repeats repeats) {
  return threadRegions().enter(policy, std::move(name), repeats);
}

void leaveRegion(uint64_t id) { threadRegions().leave(id); }

void storageEmptied(c10::StorageImpl* storage) { threadRegions().storageEmptied(storage); }

Recorder* recorderThatEndsWith(uint64_t id) { return threadRegions().recorderThatEndsWith(id); }

Opaque::Opaque(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  for (const at::Tensor& tensor : tensors_) {
    opaqueWriteBegins(tensor);
  }
}

Opaque::~Opaque() {
  for (const at::Tensor& tensor : tensors_) {
    try {
      opaqueWriteEnds(tensor);
    } catch (const std::exception& error) {
      TORCH_WARN(error.what());  // a destructor must not throw
    }
  }
}

void opaqueWriteBegins(const at::Tensor& tensor) { threadRegions().opaqueWriteBegins(tensor); }

void opaqueWriteEnds(const at::Tensor& tensor) { threadRegions().opaqueWriteEnds(tensor); }

void collectiveWrites(const at::Tensor& tensor) {
  beforeUnseenWrite(tensor);
  noteInTransit(tensor);
  if (Recorder* recorder = openRecorder()) {
    recorder->collectiveWrites(tensor);
  } else {
    moveVersionOfComputed(tensor);
  }
}

void nameValue(const at::Tensor& tensor, const std::string& name) {
  if (Recorder* recorder = openRecorder()) {
    recorder->name(tensor, name);
  }
}

bool inRegion() { return openRecorder() != nullptr; }

}  // namespace ebb
