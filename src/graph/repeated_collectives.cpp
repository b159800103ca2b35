#include "graph/repeated_collectives.h"

#include <algorithm>
#include <map>
#include <utility>

#include "graph/graph.h"
#include "kernel/collective.h"

namespace ebb {

void RepeatedCollectives::needs(const c10::intrusive_ptr<Value>& value) {
  needed_.emplace_back(value);
}

void RepeatedCollectives::close(Graph& graph) {
  ++graph.lastVisit;
  std::vector<const Value*> toVisit;
  for (const auto& weak : needed_) {
    if (const auto value = weak.lock()) {
      toVisit.push_back(value.get());
    }
  }
  while (!toVisit.empty()) {
    const Value* value = toVisit.back();
    toVisit.pop_back();
    const auto& recipe = value->recipe();
    if (!recipe || value->decision.isKept() || recipe->visit == graph.lastVisit) {
      continue;
    }
    recipe->visit = graph.lastVisit;
    if (recipe->op.limits.communicates) {
      list_.push_back(recipe);
    }
    for (const Input& input : recipe->inputs()) {
      if (input.value && !input.wholeOverwrite) {
        toVisit.push_back(input.value.get());
      }
    }
  }
  std::sort(list_.begin(), list_.end(), [](const auto& a, const auto& b) {
    return a->sequence < b->sequence;
  });
  needed_.clear();
  due_.store(!list_.empty(), std::memory_order_release);
}

std::vector<c10::intrusive_ptr<Recipe>> RepeatedCollectives::take() {
  unfinished_ = true;
  return std::exchange(list_, {});
}

std::vector<std::pair<std::string, std::string>> RepeatedCollectives::inWords() const {
  std::map<std::string, std::string> ofGroups;
  for (const auto& recipe : list_) {
    ofGroups[processGroupOf(recipe->op, recipe->others)] += recipe->op.name + ' ';
  }
  return {ofGroups.begin(), ofGroups.end()};
}

}  // namespace ebb
