#include "plugins/custom_operators/kept_results.h"

#include <c10/util/Synchronized.h>

#include <map>
#include <memory>
#include <set>
#include <utility>

#include "plugins/custom_operators/python_calls.h"

namespace ebb {
namespace {

struct GraphEnd final : RegionEvents {
  explicit GraphEnd(KeptResults& results) : results(results) {}
  void willClose() override { results.closing(); }

  KeptResults& results;  // lives until the thread has left the region
};

}  // namespace

KeptResults& KeptResults::of(const Context& context) {
  for (const auto& note : *context.notes) {
    if (auto* known = dynamic_cast<KeptResults*>(note.get())) {
      return *known;
    }
  }
  auto made = std::make_unique<KeptResults>(context.graph->names.front());
  KeptResults& results = *made;
  context.notes->push_back(std::move(made));
  return results;
}

void KeptResults::add(
    const c10::intrusive_ptr<Graph>& graph, const c10::intrusive_ptr<Value>& result,
    const OpTraits& op) {
  if (WeakGraph weak(graph); weak != graph_) {
    graph->observers.add(std::make_unique<GraphEnd>(*this));
    graph_ = std::move(weak);
  }
  all_.push_back({c10::weak_intrusive_ptr<Value>(result), &op});
}

void KeptResults::closing() {
  for (Result& result : all_) {
    const auto value = result.value.lock();
    result.saved = value && value->uses().packed() > 0 ? value->home().nbytes() : 0;
  }
}

KeptResults::~KeptResults() {
  try {
    tell();
  } catch (...) {  // a log must not end the process
  }
}

void KeptResults::tell() const {
  static auto* told = new c10::Synchronized<std::set<const OpTraits*>>;
  std::map<const OpTraits*, size_t> bytes;
  for (const Result& result : all_) {
    const auto value = result.value.lock();
    bytes[result.op] += result.saved != 0                ? result.saved
                        : value && value->home().bytes() ? value->home().nbytes()
                                                         : 0;
  }
  for (const auto& [op, held] : bytes) {
    const auto isFirst = [op](auto& ops) { return ops.insert(op).second; };
    if (held > 0 && tellKept != nullptr && told->withLock(isFirst)) {
      tellKept(op->name, region_, held);
    }
  }
}

}  // namespace ebb
