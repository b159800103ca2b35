#include "ahead/upcoming.h"

#include <algorithm>

namespace ebb {
namespace {

bool canBegin(const Graph& graph) {
  return graph.lookahead && graph.lookahead->state.load() == AheadState::Recorded &&
         !graph.lookahead->asked.load();
}

bool isAhead(const Graph& graph) {
  return !graph.lookahead->asked.load();
}

// Removes graphs that no longer exist or for which `stays` is false.
void keepOnly(std::vector<WeakGraph>& graphs, bool (*stays)(const Graph&), Upcoming::Seen& seen) {
  const auto goes = [&](const WeakGraph& weak) {
    seen.push_back(weak.lock());
    return !seen.back() || !stays(*seen.back());
  };
  graphs.erase(std::remove_if(graphs.begin(), graphs.end(), goes), graphs.end());
}

bool isBefore(const WeakGraph& a, const WeakGraph& b) {
  return a.lock()->lookahead->number < b.lock()->lookahead->number;
}

}  // namespace

c10::intrusive_ptr<Graph> Upcoming::take(size_t most, Seen& seen) {
  keepOnly(ahead_, &isAhead, seen);
  keepOnly(candidates_, &canBegin, seen);
  if (candidates_.empty() || ahead_.size() >= most) {
    return {};
  }
  auto latest = std::max_element(candidates_.begin(), candidates_.end(), &isBefore)->lock();
  auto recorded = AheadState::Recorded;
  if (!latest->lookahead->state.compare_exchange_strong(recorded, AheadState::Begun)) {
    return {};  // backward has just arrived
  }
  ahead_.emplace_back(latest);
  return latest;
}

}  // namespace ebb
