#include "graph/recipe.h"

#include <c10/util/StringUtil.h>

#include "conditions/kernel_state.h"
#include "conditions/random_state.h"
#include "counts/statistics.h"
#include "graph/graph.h"
#include "memory/arena.h"

namespace ebb {
namespace {

// Note [Long chains die without recursion]
// A value owns its recipe and a recipe its inputs, so dropping the last handle of a chain of
// 100,000 ops would recurse 100,000 levels deep. The outermost dying recipe therefore collects the
// values dropped by inner recipes, and drops the values in a loop.
using Dying = c10::SmallVector<c10::intrusive_ptr<Value>, 16>;
// See Note [Static TLS]
[[gnu::tls_model("initial-exec")]] constinit thread_local Dying* tlsDying = nullptr;

void drop(c10::intrusive_ptr<Value>&& value) {
  if (!value) {
    return;
  }
  if (value.use_count() > 1) {
    value.reset();
    return;
  }
  if (tlsDying != nullptr) {
    tlsDying->push_back(std::move(value));
    return;
  }
  Dying dying;
  tlsDying = &dying;
  dying.push_back(std::move(value));
  while (!dying.empty()) {
    const auto next = std::move(dying.back());
    dying.pop_back();
  }
  tlsDying = nullptr;
}

}  // namespace

void* Recipe::operator new(size_t size, size_t extra, Extra) { return arenaAllocate(size + extra); }

void Recipe::operator delete(void* block, size_t, Extra) { arenaFree(block); }

void Recipe::operator delete(void* block) { arenaFree(block); }

c10::intrusive_ptr<Recipe> Recipe::make(
    const OpTraits& op, uint32_t inputCount, uint32_t shapeCount) {
  static_assert(
      alignof(Recipe) <= kArenaAlignment && alignof(c10::IValue) <= alignof(Recipe) &&
      alignof(Input) <= alignof(Recipe));
  const size_t extra = op.arguments.others.size() * sizeof(c10::IValue) +
                       inputCount * sizeof(Input) + shapeCount * sizeof(int64_t);
  auto* recipe = new (extra, Extra{}) Recipe(op, inputCount);
  // The new object's reference count is 0. unsafe_steal_from_new sets the count to 1, as
  // make_intrusive does.
  return c10::intrusive_ptr<Recipe>::unsafe_steal_from_new(recipe);
}

Recipe::Recipe(const OpTraits& traits, uint32_t inputCount) : op(traits), inputCount_(inputCount) {
  std::uninitialized_default_construct_n(inputs().data(), inputCount);
  std::uninitialized_default_construct_n(others(), op.arguments.others.size());
  count(liveCounts().recipes, 1);
}

Recipe::~Recipe() {
  count(liveCounts().recipes, -1);
  for (Input& input : inputs()) {
    drop(input.value.take());
  }
  std::destroy_n(others(), op.arguments.others.size());
  std::destroy_n(inputs().data(), inputCount_);
}

std::string where(const Graph& graph, const Recipe& recipe) {
  return recipe.op.name + " in region '" + graph.names[recipe.region] + "'";
}

std::string otherBits(
    const Graph& graph, const Recipe& recipe, const Output& output, const char* cause) {
  return c10::str(
      "ebb: cannot recompute ", where(graph, recipe),
      ": with the same arguments the operator gave other bits than in the forward, in ",
      output.written ? "argument " : "result ", output.slot, ".", cause,
      " The operator keeps state that its arguments do not show (a counter, a cache, a generator "
      "of its own), or it is not deterministic. Give ",
      recipe.op.name,
      " the decision SAVE: a rule of the policy, MUST_SAVE in a context_fn, or "
      "EBB='recompute_all,",
      recipe.op.op.schema().name(), ":save'.");
}

}  // namespace ebb
