#include "graph/repeated_collectives.h"

#include <algorithm>
#include <utility>

#include "graph/graph.h"
#include "kernel/collective.h"

namespace ebb {

void RepeatedCollectives::needs(const c10::intrusive_ptr<Value>& value) {
  needed_.emplace_back(value);
}

void RepeatedCollectives::close(Graph& graph) {
  isOpen_ = false;
  due_.store(collect(graph) || unfinished_, std::memory_order_release);
}

bool RepeatedCollectives::collect(Graph& graph) {
  const uint32_t visit = ++graph.numbers.visit;
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
    const bool hasBytes = value->decision.isKept() && !value->home.isSuperseded();
    if (!recipe || hasBytes || recipe->visit == visit) {
      continue;
    }
    recipe->visit = visit;
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
  // If the ranks' comparison failed, the list kept its recipes, and now has some of them twice.
  list_.erase(std::unique(list_.begin(), list_.end()), list_.end());
  needed_.clear();
  return !list_.empty();
}

std::vector<c10::intrusive_ptr<Recipe>> RepeatedCollectives::take() {
  unfinished_ = true;
  return std::exchange(list_, {});
}

// A list contains no names of groups, since a group may have another name on another rank.
std::map<std::string, std::string> RepeatedCollectives::ofGroups() const {
  std::map<std::string, std::string> lists;
  for (const auto& recipe : list_) {
    lists[processGroupOf(recipe->op, recipe->others())];
  }
  for (const auto& recipe : list_) {
    const std::string group = processGroupOf(recipe->op, recipe->others());
    for (auto& [name, list] : lists) {
      list +=
          (list.empty() ? "" : ", ") + recipe->op.name + (name == group ? "" : " of another group");
    }
  }
  return lists;
}

}  // namespace ebb
