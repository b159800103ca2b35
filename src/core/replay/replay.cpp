#include "replay/replay.h"

#include <ATen/record_function.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "conditions/kernel_state.h"
#include "counts/statistics.h"
#include "graph/recipe.h"
#include "hooks/store.h"
#include "replay/rerun.h"
#include "replay/transient_values.h"

namespace ebb {
namespace {

// Restores the bytes of a stored value. Returns null if `watch` does not allow the
// copy yet, or if an unseen write moved the version before a recorded write made the stash
// independent of the storage (Home::isPrivate). See Note [Stored values].
c10::Storage fetchStash(Graph& graph, Value& value, ReplayWatch* watch = nullptr) {
  RECORD_USER_SCOPE("ebb::reload " + graph.names.front());
  const c10::Storage living = value.home().living();
  if (!living && !value.home().isPrivate() && !value.versions().areUnmoved()) {
    return {};
  }
  graph.observers.tell(&BackwardEvents::fetches, value);
  c10::Storage bytes = watch ? watch->fetch(value, living) : value.stash()->fetch(living);
  if (!bytes) {
    return {};
  }
  value.restore(std::move(bytes), !living);
  if (!living) {
    graph.streams.findPlace();
    graph.streams.made(value, value.home().bytes());
  }
  graph.observers.tell(&BackwardEvents::fetched, value);
  return value.home().bytes();
}

// The recipes that one value needs.
class Slice {
 public:
  // `watch` is set for a replay ahead; null: backward waits for the value.
  Slice(Graph& graph, Value& wanted, ReplayWatch* watch = nullptr)
      : graph_(graph), watch_(watch), transient_(wanted, watch == nullptr) {}

  // For a recipe that must run even if nothing needs its results.
  explicit Slice(Graph& graph) : graph_(graph), watch_(nullptr) {}

  // Finds the recipes to run, up to `root`. Returns false if a replay ahead may not run them.
  bool collect(const c10::intrusive_ptr<Recipe>& root) {
    ++graph_.numbers.visit;
    graph_.streams.findPlace();
    add(root);
    for (size_t next = 0; next < recipes_.size(); ++next) {
      const Recipe& recipe = *recipes_[next];
      for (const Input& input : recipe.inputs()) {
        if (input.value && !input.wholeOverwrite && !need(*input.value, recipe)) {
          return false;
        }
      }
    }
    std::sort(recipes_.begin(), recipes_.end(), [](const auto& a, const auto& b) {
      return a->sequence < b->sequence;
    });
    return true;
  }

  // Runs the recipes. Returns false if the watch stopped the replay.
  bool run() {
    const ReplayTimer timer(watch_ != nullptr);
    return runRecipes();
  }

 private:
  using Changes = KernelStateGuard::Changes;

  bool runRecipes() {
    RegionCounters counters;
    bool goesOn = true;
    uint16_t region = recipes_.front()->region;
    std::optional<KernelStateGuard> guard;
    const KernelState* state = nullptr;
    torch::jit::Stack stack;
    for (auto& recipe : recipes_) {
      goesOn = watch_ == nullptr || watch_->begin(*recipe);
      if (!goesOn) {
        break;
      }
      if (recipe->region != region) {
        statisticsAdd(graph_.names[region], std::exchange(counters, {}));
        region = recipe->region;
      }
      if (recipe->kernel.state != state) {
        guard.reset();
        state = recipe->kernel.state;
        guard.emplace(*state, watch_ ? Changes::OfThread : Changes::OfProcess);
      }
      rerun(graph_, *recipe, stack, transient_, watch_ != nullptr);
      stack.clear();
      transient_.hasRun(*recipe);
      ++counters.opsReplayed;
      recipe.reset();  // frees inputs without other users
      if (watch_) {
        ++counters.opsReplayedAhead;
        watch_->end();
      }
    }
    statisticsAdd(graph_.names[region], counters);
    pinned_.clear();
    return goesOn;
  }

  void add(const c10::intrusive_ptr<Recipe>& recipe) {
    if (recipe->visit != graph_.numbers.visit) {
      recipe->visit = graph_.numbers.visit;
      checkRegistered(*recipe);
      graph_.observers.tell(&BackwardEvents::willNeed, graph_, *recipe);
      recipes_.push_back(recipe);
    }
  }

  // Prepares `value` as an input of `consumer`: makes the bytes available, or adds the value's
  // recipe to the slice. Returns false if a replay ahead may not read the value.
  bool need(Value& value, const Recipe& consumer) {
    if (value.state() == ValueState::Away) {
      if (!fetchStash(graph_, value, watch_) && watch_) {
        return false;
      }
    }
    if (c10::Storage storage = value.available()) {
      if (watch_ && !watch_->mayRead(value, storage, consumer)) {
        return false;
      }
      checkPlace(value, consumer);
      // A replay ahead makes this check after the kernel.
      const bool changed = !watch_ && hasChanged(value, storage);
      if (changed && value.recipe()) {
        becomeRecomputable(value, storage);
        add(value.recipe());
        return true;
      }
      checkUnchanged(changed, consumer);
      pinned_.push_back(std::move(storage));
    } else if (value.recipe()) {
      add(value.recipe());
      transient_.needs(consumer, value);
    } else if (watch_) {
      return false;  // the bytes may return before backward, as a parameter of FSDP does
    } else {
      throwLostLeaf(value, consumer);
    }
    return true;
  }

  bool hasChanged(const Value& value, const c10::Storage& storage) const {
    return value.facts().changedBeforeCopy ||
           (!value.home().isPrivate() &&
            ebb::hasChanged(value, storage, graph_.rules.fingerprints()));
  }

  // Makes ebb recompute a value whose storage an unseen write has changed. From then on, recipes
  // read the recomputed value. Handles show the new contents, as eager's saved tensors do.
  static void becomeRecomputable(Value& value, const c10::Storage& written) {
    value.showInstead(written);
    value.release();
  }

  // Throws if an input without a recipe has changed. If all results are compared, ebb leaves it to
  // the comparison, since the change may not matter.
  void checkUnchanged(bool changed, const Recipe& consumer) const {
    TORCH_CHECK(
        !changed || graph_.rules.compareAll,
        "one of the variables needed for gradient computation has been modified without a change "
        "of its version counter: ebb must recompute ",
        where(graph_, consumer),
        ", but one of its inputs has changed since the forward. Likely causes: a write through "
        ".data, a fused optimizer step, batch norm statistics, or numpy, before backward. Move the "
        "write after backward, or give ",
        consumer.op.name, " the decision SAVE.");
  }

  // See Note [Bytes of a capture]
  void checkPlace(const Value& value, const Recipe& consumer) const {
    TORCH_CHECK(
        graph_.streams.mayUse(value), "ebb: cannot recompute ", where(graph_, consumer),
        ": one of its inputs was recomputed ", GraphStreams::kElsewhere, ", or give ",
        consumer.op.name, " the decision SAVE.");
  }

  void checkRegistered(const Recipe& recipe) const {
    TORCH_CHECK(
        recipe.op.state.registered.load(std::memory_order_acquire), "ebb: cannot recompute ",
        where(graph_, recipe),
        ": the operator was unregistered after the forward. Keep its library alive until backward "
        "has run, or give it the decision SAVE.");
  }

  // See Note [Version checks]
  [[noreturn]] void throwLostLeaf(const Value& value, const Recipe& consumer) const {
    const std::string who = where(graph_, consumer);
    const c10::Storage& bytes = value.home().bytes();
    TORCH_CHECK(
        !bytes || bytes.nbytes() == value.home().nbytes(), "ebb: cannot recompute ", who,
        ": the storage of one of its inputs was resized from ", value.home().nbytes(), " to ",
        bytes.nbytes(),
        " bytes after the region (a parameter or a buffer that was freed). Restore it before "
        "backward, make each block whose parameters are freed a region of its own (ebb.apply), or "
        "give ",
        consumer.op.name, " the decision SAVE.");
    TORCH_CHECK(
        value.state() != ValueState::Empty, "ebb: cannot recompute ", who,
        ": an earlier backward failed while it recomputed the inputs. Run the forward again.");
    TORCH_CHECK(
        false,
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation: ebb must recompute ",
        who, ", and one of its inputs is at version ",
        value.versions().areCounted() ? value.versions().written().counter.current_version() : 0,
        "; expected version ", value.versions().written().version,
        " instead. Move the write after backward, run all forwards that update this input (batch "
        "norm statistics, a momentum buffer) in one region, or give ",
        consumer.op.name, " the decision SAVE.");
  }

  Graph& graph_;
  ReplayWatch* const watch_;
  std::vector<c10::intrusive_ptr<Recipe>> recipes_;  // to run, sorted by sequence
  std::vector<c10::Storage> pinned_;                 // living storages that the recipes read
  TransientValues transient_;  // destroyed first: recipes_ keep its values alive
};

}  // namespace

void runRecipe(const ReplayLock& locked, c10::intrusive_ptr<Recipe> recipe) {
  Slice slice(locked.graph());
  slice.collect(std::exchange(recipe, {}));
  slice.run();
}

// Note [Replay]
// To materialise a value, ebb collects the needed recipes backwards from the value and stops at
// values whose bytes are available. These recipes are a slice. They run in the order of recording,
// with autograd, dispatch modes and ebb's key excluded. Each referenced result gets its bytes and
// drops its recipe. Inputs without other users are freed with the recipe. So a slice holds as
// little memory as possible, and no recipe runs twice, unless the policy says so: see Note [Made
// each time].
c10::Storage materialise(const ReplayLock& locked, Value& value) {
  Graph& graph = locked.graph();
  if (value.state() == ValueState::Away) {
    return fetchStash(graph, value);
  }
  if (c10::Storage storage = value.available()) {
    return storage;
  }
  TORCH_CHECK(
      value.recipe(), "ebb: cannot recompute a tensor saved in region '", graph.names.front(),
      "': an earlier backward of this graph failed while it recomputed the tensor. Run the forward "
      "again.");
  if (graph.rules.sameOnAllRanks) [[unlikely]] {
    graph.observers.tell(&BackwardEvents::beginsReplay, locked);
    if (c10::Storage storage = value.available()) {
      return storage;
    }
  }
  Slice slice(graph, value);
  slice.collect(value.recipe());
  slice.run();
  TORCH_INTERNAL_ASSERT(value.home().bytes());
  return value.home().bytes();
}

bool materialiseWatched(const ReplayLock& locked, Value& value, ReplayWatch& watch) {
  Graph& graph = locked.graph();
  if (!value.recipe() || value.available()) {
    return true;
  }
  if (graph.rules.onlyInBackward || graph.streams.areOfCapture()) {
    return false;
  }
  Slice slice(graph, value, &watch);
  return slice.collect(value.recipe()) && slice.run();
}

}  // namespace ebb
