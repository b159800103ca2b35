#include "replay/same_node.h"

#include <exception>
#include <vector>

#include "graph/recipe.h"
#include "replay/replay.h"

namespace ebb {
namespace {

// True if a replay of `value` reads the bytes of `input`.
bool reads(Graph& graph, const Value& value, const Value& input) {
  const uint32_t visit = ++graph.numbers.visit;
  std::vector<Recipe*> waiting{value.recipe().get()};
  while (!waiting.empty()) {
    Recipe& recipe = *waiting.back();
    waiting.pop_back();
    for (const Input& read : recipe.inputs()) {
      if (read.value.get() == &input) {
        return true;
      }
      Recipe* maker = read.value && !read.value->available() ? read.value->recipe().get() : nullptr;
      if (maker != nullptr && maker->visit != visit) {
        maker->visit = visit;
        waiting.push_back(maker);
      }
    }
  }
  return false;
}

}  // namespace

void materialiseSameNode(const ReplayLock& locked, const Value& input, uint32_t node) {
  Graph& graph = locked.graph();
  for (const auto& value : graph.numbers.packs.of(node)) {
    const bool waits = value->recipe() && value->uses().handles() > 0 && !value->available() &&
                       !value->decision().isMadeEachTime();
    if (waits && reads(graph, *value, input)) {
      graph.observers.tell(&BackwardEvents::replaysWith, input, *value);
      try {
        materialise(locked, *value);
      } catch (const std::exception&) {
        return;
      }
    }
  }
}

}  // namespace ebb
