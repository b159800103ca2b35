#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <string>
#include <utility>

#include "conditions/fingerprint.h"
#include "graph/graph.h"
#include "graph/recipe.h"
#include "hooks/call_guard.h"
#include "hooks/observer.h"
#include "intercept/in_transit.h"
#include "plugins/collectives/collective.h"
#include "plugins/collectives/ranks.h"
#include "plugins/collectives/repeated_collectives.h"
#include "record/arguments.h"
#include "record/context.h"
#include "record/retention.h"
#include "replay/replay.h"

namespace ebb {
namespace {

// Added to the message if a repeated collective gave other bits than in the forward.
constexpr const char* kOtherOrder =
    " Ranks ran the backward of their regions in different orders, or another collective of the "
    "process group came in between, such as DDP's with unused parameters: give DDP a process group "
    "of its own, or use a policy that keeps the results of collectives.";

// Throws unless all ranks of the process groups repeat the same collectives.
void compareWithOtherRanks(const Graph& graph, const RepeatedCollectives& collectives) {
  const std::string& region = graph.names.front();
  const CollectivesOfRanks* ranks = collectivesOfRanks();
  TORCH_CHECK(
      ranks != nullptr, "ebb: cannot recompute the collectives of region '", region,
      "' in a program without Python: its ranks cannot compare them. Use a policy that keeps the "
      "results of collectives.");
  const bool always = graph.rules.compareAll;
  for (const auto& [group, words] : collectives.inWords()) {
    const std::string why = ranks->compare(group, region, words.place, words.list, always);
    TORCH_CHECK(why.empty(), why);
  }
}

// Repeats the collectives that are due.
void repeat(const ReplayLock& locked, RepeatedCollectives& collectives) {
  Graph& graph = locked.graph();
  const std::string& region = graph.names.front();
  TORCH_CHECK(
      !collectives.areUnfinished(), "ebb: cannot recompute region '", region,
      "': an earlier backward failed while it repeated the region's collectives. Run the forward "
      "again.");
  if (!collectives.areDue()) {
    return;
  }
  const bool repeats = collectives.collect(graph);
  const bool isInBackward = torch::autograd::get_current_graph_task_id() != -1;
  // Backward also compares a new list that is empty, since the other ranks may have another list.
  if (!repeats && (collectives.isOpen() || !isInBackward)) {
    return;
  }
  TORCH_CHECK(
      isInBackward, "ebb: a saved tensor of region '", region,
      "' was read outside of backward. Its recomputation repeats collectives, in which all ranks "
      "must take part. Read it in a hook that runs in backward on all ranks, or use a policy that "
      "keeps the results of collectives.");
  compareWithOtherRanks(graph, collectives);
  for (auto& repeated : collectives.take()) {
    runRecipe(locked, std::move(repeated.recipe));
    repeated.results.clear();  // frees the results that nothing needs
  }
  collectives.finished();
}

// Off the CPU there is no fingerprint.
void takeFingerprint(Value& value, const at::Tensor& tensor) {
  if (const uint64_t taken = fingerprint(tensor.storage())) {
    value.attach(c10::make_intrusive<ResultFingerprint>(taken));
  }
}

// See Note [Repeated collectives]
class CollectivesObserver final : public RegionEvents, public BackwardEvents {
 public:
  explicit CollectivesObserver(Graph& graph)
      : graph_(graph), collectives_(*graph.extras.get<RepeatedCollectives>()) {}

  ExtraPtr packed(Value& value, const at::Tensor& tensor, Retention retention) override {
    if (retention == Retention::Recomputed) {
      collectives_.needs(value);
    }
    return {};
  }
  void willClose() override { collectives_.close(graph_); }
  // Called at the first unpack of the graph, whether or not the unpacked bytes need a replay.
  void unpacks(Graph& graph) override {
    if (collectives_.areDue()) {
      repeat(ReplayLock(graph), collectives_);
    }
  }
  void beginsReplay(const ReplayLock& locked) override {
    if (collectives_.areDue()) {
      repeat(locked, collectives_);
    }
  }
  void willNeed(const Graph& graph, const Recipe& recipe) override {
    TORCH_CHECK(
        !recipe.op.limits.asynchronous || collectives_.areUnfinished(), "ebb: cannot recompute ",
        where(graph, recipe),
        ": ebb repeats only the collectives on which saved tensors depended when the region ended. "
        "Give ",
        recipe.op.name, " the decision SAVE.");
  }

 private:
  Graph& graph_;
  RepeatedCollectives& collectives_;
};

// The first collective of a graph adds the observer, so other graphs have none.
void records(Graph& graph, const std::string& group) {
  if (graph.extras.get<RepeatedCollectives>() == nullptr) {
    graph.rules.sameOnAllRanks = true;
    graph.extras.set(c10::make_intrusive<RepeatedCollectives>(graph.rules));
    graph.observers.add(std::make_unique<CollectivesObserver>(graph));
  }
  graph.extras.get<RepeatedCollectives>()->records(group);
}

// Waits for the communication, and takes fingerprints of the complete results.
class WaitingRun final : public GuardedRun {
 public:
  WaitingRun(const OpTraits& op, std::string group) : op_(op), group_(std::move(group)) {}

  void hasRun(const c10::IValue* results) override {
    waitForCollective(results, op_.results.size(), group_);
  }
  void made(const GuardedResult& result) override {
    if (result.value->recipe()) {
      takeFingerprint(*result.value, result.tensor);
    }
  }

 private:
  const OpTraits& op_;
  const std::string group_;
};

class Collectives final : public CallGuard {
 public:
  const char* whyNotReplayed(const GuardedCall& guarded) override {
    const bool isNamed = guarded.context.trusts(guarded.verdict);
    return isNamed ? nullptr : "no rule of the policy names the collective";
  }

  // ebb waits for the communication on the CPU only, and only for synchronous collectives, for
  // which the program waits too. A wait for an asynchronous collective could keep the other ranks
  // waiting. If all results are compared, ebb always waits.
  std::unique_ptr<GuardedRun> begins(const GuardedCall& guarded) override {
    if (guarded.recipe == nullptr) {
      return nullptr;
    }
    const OpTraits& op = guarded.call.op;
    Graph& graph = *guarded.context.graph;
    std::string group = processGroupOf(op, guarded.recipe->others());
    records(graph, group);
    const bool waits = graph.rules.compareAll || (!guarded.arguments.areOffCpu() &&
                                                  isSynchronous(op, guarded.call.arguments));
    return waits ? std::make_unique<WaitingRun>(op, std::move(group)) : nullptr;
  }

  // If the program reads a result, the communication is complete. A write does not show that: when
  // the program waits for gloo's reduce-scatter, gloo writes the result with copy_.
  void isRead(Value& value, const at::Tensor& tensor) override {
    if (value.extra<ResultFingerprint>() == nullptr) {
      takeFingerprint(value, tensor);
    }
  }

  void hasReplayed(const Recipe& recipe, const std::vector<c10::IValue>& stack) override {
    waitForCollective(stack.data(), stack.size(), processGroupOf(recipe.op, recipe.others()));
  }

  // A repeated collective runs only once in backward, so a value takes the result of that run, even
  // if the forward's result is still in memory because the program or a thread of the backend holds
  // the storage.
  bool repeatsAll() const override { return true; }

  void check(const ReplayedResult& result) override {
    const auto* expected = result.value.extra<ResultFingerprint>();
    TORCH_CHECK(
        expected == nullptr || fingerprint(result.storage) == expected->fingerprint,
        otherBits(result.graph, result.recipe, result.output, kOtherOrder));
  }
};

[[maybe_unused]] const bool isRegistered = [] {
  static auto* guard = new Collectives;
  return registerGuard(Guarded::Collectives, *guard);
}();

}  // namespace

}  // namespace ebb
