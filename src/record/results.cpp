#include "record/results.h"

#include "graph/geometry.h"

namespace ebb {

void Results::add(const ValueMap& values, const c10::intrusive_ptr<Graph>& graph) {
  if (all_.size() >= sweepAt_) {
    forgetDead();
  }
  for (const auto& [storage, value] : values.all()) {
    if (value->madeHere && !value->home.expired()) {
      all_.insert_or_assign(storage, Made{value->address, WeakGraph(graph)});
    }
  }
}

WeakGraph Results::madeBy(const at::Tensor& tensor) const {
  const auto found = all_.find(storageOf(tensor));
  const bool known = found != all_.end() && found->second.address == tensor.storage().data();
  return known ? found->second.by : WeakGraph(c10::intrusive_ptr<Graph>());
}

void Results::forgetDead() {
  for (auto entry = all_.begin(); entry != all_.end();) {
    entry = entry->second.by.expired() ? all_.erase(entry) : std::next(entry);
  }
  sweepAt_ = 2 * all_.size() + 64;
}

}  // namespace ebb
