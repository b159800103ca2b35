#include <torch/csrc/autograd/engine.h>

#include <memory>
#include <string>
#include <utility>

#include "conditions/collective.h"
#include "graph/graph.h"
#include "graph/recipe.h"
#include "hooks/observer.h"
#include "plugins/collectives/ranks.h"
#include "plugins/collectives/repeated_collectives.h"
#include "record/retention.h"
#include "replay/replay.h"

namespace ebb {
namespace {

// Throws unless all ranks of the process groups repeat the same collectives.
void compareWithOtherRanks(const Graph& graph, const RepeatedCollectives& collectives) {
  const std::string& region = graph.names.front();
  const CollectivesOfRanks* ranks = collectivesOfRanks();
  TORCH_CHECK(
      ranks != nullptr,
      "ebb: cannot recompute the collectives of region '",
      region,
      "' in a program without Python: its ranks cannot compare them. Use a policy that keeps the "
      "results of collectives.");
  const bool always = graph.rules.compareAll;
  for (const auto& [group, words] : collectives.ofGroups()) {
    const std::string why = ranks->compare(group, region, words.place, words.list, always);
    TORCH_CHECK(why.empty(), why);
  }
}

// Repeats the collectives that are due.
void repeat(const ReplayLock& locked, RepeatedCollectives& collectives) {
  Graph& graph = locked.graph();
  const std::string& region = graph.names.front();
  TORCH_CHECK(
      !collectives.areUnfinished(),
      "ebb: cannot recompute region '",
      region,
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
      isInBackward,
      "ebb: a saved tensor of region '",
      region,
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

// See Note [Repeated collectives]
class CollectivesObserver final : public RegionEvents, public BackwardEvents {
 public:
  explicit CollectivesObserver(Graph& graph)
      : graph_(graph), collectives_(*graph.extras.get<RepeatedCollectives>()) {
  }

  ExtraPtr packed(Value& value, const at::Tensor& tensor, Retention retention) override {
    if (retention == Retention::Recomputed) {
      collectives_.needs(value);
    }
    return {};
  }
  void willClose() override {
    collectives_.close(graph_);
  }
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
        !recipe.op.limits.communicates || collectives_.areUnfinished(),
        "ebb: cannot recompute ",
        where(graph, recipe),
        ": ebb repeats only the collectives on which saved tensors depended when the region ended. "
        "Give ",
        recipe.op.name,
        " the decision SAVE.");
  }

 private:
  Graph& graph_;
  RepeatedCollectives& collectives_;
};

// The first collective of a graph adds the observer, so other graphs have none.
void records(Graph& graph, const Recipe& recipe) {
  if (graph.extras.get<RepeatedCollectives>() == nullptr) {
    graph.rules.sameOnAllRanks = true;
    graph.extras.set(c10::make_intrusive<RepeatedCollectives>(graph.rules));
    graph.observers.add(std::make_unique<CollectivesObserver>(graph));
  }
  graph.extras.get<RepeatedCollectives>()->records(processGroupOf(recipe.op, recipe.others()));
}

[[maybe_unused]] const bool isRegistered = followCollectives(&records);

}  // namespace

}  // namespace ebb
