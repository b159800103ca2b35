#include "plugins/ahead/graph_replay.h"

#include <c10/util/ScopeExit.h>

#include "conditions/kernel_state.h"
#include "conditions/random_state.h"
#include "graph/recipe.h"
#include "hooks/store.h"

namespace ebb {

std::atomic<void (*)(uint64_t sequence)> beforeReplayAhead{nullptr};

GraphReplay::GraphReplay(Graph& graph, const std::atomic<bool>& ends)
    : graph_(graph), lookahead_(*lookaheadOf(graph)), ends_(ends) {}

AheadEnd GraphReplay::run() {
  while (makeNext()) {
  }
  return why_;
}

// Materialises the next value. Returns false at the end of the replay. The graph's lock is held for
// one value only, so backward waits for one value at most.
bool GraphReplay::makeNext() {
  if (lookahead_.asked.load() || ends_.load()) {
    return leave(AheadEnd::Asked);
  }
  const ReplayLock locked(graph_);
  if (next_ >= lookahead_.wanted.size()) {
    return isPartLeft_ && leave(AheadEnd::Stopped);
  }
  const auto value = lookahead_.wanted[next_++].value.lock();
  if (!value || value->uses().handles() == 0 || value->redefined()) {
    return true;
  }
  if (value->decision().isMadeEachTime()) {  // see Note [Made each time]
    isPartLeft_ |= !value->available();
    return true;
  }
  scope_.emplace();  // before the first recipe, since materialiseWatched() also fetches inputs
  const auto afterwards = c10::make_scope_exit([&] { end(); });
  const bool isThere = scope_->holds() && materialiseWatched(locked, *value, *this);
  return isThere || leave(why_ == AheadEnd::Done ? AheadEnd::Stopped : why_);
}

bool GraphReplay::leave(AheadEnd why) {
  why_ = why;
  return false;
}

bool GraphReplay::mayRead(const Value& input, const c10::Storage& storage, const Recipe& by) {
  if (input.home().isPrivate()) {
    return true;
  }
  const bool sameMemory =
      input.home().address() == nullptr || storage.data() == input.home().address();
  if (input.recipe() || !sameMemory) {
    return false;
  }
  lookahead_.onArrival.hasRead(input, by.op.name);
  return true;
}

c10::Storage GraphReplay::fetch(Value& input, const c10::Storage& living) {
  forgetFreed();
  if (!lookahead_.take(input.home().nbytes())) {
    return {};
  }
  c10::Storage bytes = input.stash()->fetchAhead(living);
  if (!bytes) {
    return {};
  }
  if (input.stash()->awaitsBackward()) {
    lookahead_.onArrival.cameBack.push_back(input.stash());
  }
  if (input.uses().handles() == 0) {
    intermediates_.push_back(
        {c10::weak_intrusive_ptr<Value>::reclaim_copy(&input), input.home().nbytes()});
  }
  return bytes;
}

bool GraphReplay::begin(const Recipe& recipe) {
  if (lookahead_.asked.load() || ends_.load()) {
    return leave(AheadEnd::Asked);
  }
  if (const auto told = beforeReplayAhead.load(std::memory_order_acquire)) {
    told(recipe.sequence);
  }
  if (!scope_) {
    scope_.emplace();
  }
  if (!scope_->holds() || !allows(recipe) || !mayReadInputs(recipe) || !takeFromBudget(recipe)) {
    end();
    return false;
  }
  return true;
}

void GraphReplay::end() { scope_.reset(); }

// See Note [Hands on a storage]
bool GraphReplay::mayReadInputs(const Recipe& recipe) {
  std::vector<c10::Storage> leaves;
  for (const Input& input : recipe.inputs()) {
    const auto& value = input.value;
    if (value && !value->home().isPrivate() && value->home().bytes()) {
      leaves.push_back(value->home().bytes());
    }
  }
  return scope_->mayRead(std::move(leaves), lookahead_.closed);
}

// Note [What is not replayed ahead]
// 1. Custom operators: ebb knows nothing of their state, nor whether they may run beside other
//    operators. Their kernels may be Python.
// 2. Random operators without a Generator argument: a replay has to set the device's own generator,
//    and the program may draw from it at any time.
// 3. Recipes that need other settings of the process than the current ones.
// 4. Recipes that read a storage whose memory has been replaced, or a storage on which the program
//    has a hand: see Note [Hands on a storage].
// 5. Recipes that need pages of a pool that had an error or belongs to a CUDA graph: see Note
//    [Pages that come back ahead].
// 6. Recipes that read a recomputable value from a storage that the program still holds: if the
//    program writes to the storage, backward recomputes the value. See also Note [Writes under a
//    replay ahead].
// 7. RECOMPUTE_EACH_TIME values, except as inputs of other values; see Note [Made each time].
// When a replay ahead meets 1 to 6, backward does the rest of the graph, since most later recipes
// depend on the missing value.
bool GraphReplay::allows(const Recipe& recipe) {
  const bool sets = recipe.kernel.random &&
                    (recipe.op.random.generatorArgument < 0 || recipe.kernel.random->capture != 0);
  return !recipe.op.limits.custom && !sets && hasSettings(recipe.kernel.state->settings);
}

bool GraphReplay::hasSettings(const NumericSettings& settings) {
  if (settings.flushDenormals && settings.threads > 1) {
    return false;  // an intra-op thread keeps the setting with which it started
  }
  return settings.equalsForProcess(NumericSettings::current());
}

bool GraphReplay::takeFromBudget(const Recipe& recipe) {
  forgetFreed();
  for (const Output& output : recipe.outputs) {
    const auto value = output.value.lock();
    if (!value || value->available()) {
      continue;
    }
    if (!lookahead_.take(value->home().nbytes())) {
      return false;
    }
    if (value->uses().handles() == 0 || value->decision().isMadeEachTime()) {
      intermediates_.push_back({output.value, value->home().nbytes()});
    }
  }
  return true;
}

void GraphReplay::forgetFreed() {
  std::erase_if(intermediates_, [&](const Intermediate& each) {
    const auto value = each.value.lock();
    const bool gone = !value || (value->decision().isMadeEachTime() && !value->home().bytes());
    if (gone) {
      lookahead_.giveBack(each.nbytes);
    }
    return gone;
  });
}

}  // namespace ebb
