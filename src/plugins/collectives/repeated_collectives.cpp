#include "plugins/collectives/repeated_collectives.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <utility>

#include "plugins/collectives/collective.h"
#include "plugins/collectives/ranks.h"

namespace ebb {
namespace {

RepeatedCollectives::Repeated repeatedBy(const c10::intrusive_ptr<Recipe>& recipe) {
  RepeatedCollectives::Repeated repeated{recipe, {}};
  for (const Output& output : recipe->outputs) {
    if (auto value = output.value.lock()) {
      repeated.results.push_back(std::move(value));
    }
  }
  return repeated;
}

}  // namespace

const SlotNumber RepeatedCollectives::kSlot = takeSlot();

void RepeatedCollectives::records(const std::string& group) {
  const CollectivesOfRanks* ranks = collectivesOfRanks();
  const auto is = [&](const auto& known) { return known.first == group; };
  if (std::none_of(groups_.begin(), groups_.end(), is)) {
    groups_.emplace_back(group, ranks == nullptr ? 0 : ranks->number(group));
    setDue(true);
  }
}

void RepeatedCollectives::needs(Value& value) {
  needed_.push_back(c10::weak_intrusive_ptr<Value>::reclaim_copy(&value));
}

void RepeatedCollectives::close(Graph& graph) {
  isOpen_ = false;
  const bool repeats = collect(graph);
  const bool isNew = tellOtherRanks(graph.names.front());
  setDue(repeats || isNew || unfinished_);
}

// Returns true if the ranks of a process group have not compared such a list before.
bool RepeatedCollectives::tellOtherRanks(const std::string& region) const {
  const CollectivesOfRanks* ranks = collectivesOfRanks();
  bool isNew = false;
  if (ranks != nullptr) {
    for (const auto& [group, words] : inWords()) {
      isNew |= ranks->tell(group, region, words.place, words.list);
    }
  }
  return isNew;
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
    const bool hasBytes = value->decision().isKept() && !value->home().isOverwritten();
    if (!recipe || hasBytes || recipe->visit == visit) {
      continue;
    }
    recipe->visit = visit;
    if (recipe->op.limits.asynchronous) {
      list_.push_back(repeatedBy(recipe));
    }
    for (const Input& input : recipe->inputs()) {
      if (input.value && !input.wholeOverwrite) {
        toVisit.push_back(input.value.get());
      }
    }
  }
  std::sort(list_.begin(), list_.end(), [](const auto& a, const auto& b) {
    return a.recipe->sequence < b.recipe->sequence;
  });
  // If the ranks' comparison failed, the list kept its recipes, and now has some of them twice.
  const auto isSame = [](const auto& a, const auto& b) { return a.recipe == b.recipe; };
  list_.erase(std::unique(list_.begin(), list_.end(), isSame), list_.end());
  needed_.clear();
  return !list_.empty();
}

std::vector<RepeatedCollectives::Repeated> RepeatedCollectives::take() {
  unfinished_ = true;
  return std::exchange(list_, {});
}

// A list has the collectives of the rank's other groups too, since ranks that repeat them in other
// orders would wait for each other. It contains no names of groups, since a group may have another
// name on another rank.
std::map<std::string, RepeatedCollectives::InWords> RepeatedCollectives::inWords() const {
  std::set<std::string> repeated;
  for (const auto& [recipe, results] : list_) {
    repeated.insert(processGroupOf(recipe->op, recipe->others()));
  }
  std::map<std::string, InWords> lists;
  for (const auto& [name, number] : groups_) {
    InWords& words = lists[name];
    words.place = c10::str(number, ".", part_);
    for (size_t i = 0; i < list_.size() && repeated.contains(name); ++i) {
      const Recipe& recipe = *list_[i].recipe;
      const bool isOfGroup = processGroupOf(recipe.op, recipe.others()) == name;
      words.list += (i == 0 ? "" : ", ") + recipe.op.name + (isOfGroup ? "" : " of another group");
    }
  }
  return lists;
}

}  // namespace ebb
