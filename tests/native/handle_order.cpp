// An observer for tests: records how many handles a value counts when the data on a handle dies.
#include <pybind11/stl.h>

#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "graph/graph.h"
#include "hooks/observer.h"
#include "module.h"

namespace ebb::bindings {
namespace {

std::atomic<bool> areWatched{false};
std::vector<uint32_t> counts;  // tests of one thread

struct CountAtEnd final : Extra {
  explicit CountAtEnd(Value& value) : value(c10::intrusive_ptr<Value>::reclaim_copy(&value)) {}
  ~CountAtEnd() override { counts.push_back(value->uses().handles()); }

  const c10::intrusive_ptr<Value> value;  // outlives the handle
};

struct WatchesHandles final : RegionEvents {
  ExtraPtr packed(Value& value, const at::Tensor& tensor, Retention retention) override {
    return c10::make_intrusive<CountAtEnd>(value);
  }
};

[[maybe_unused]] const bool isHandleOrderObserved = observeGraphs([](Graph& graph) {
  if (areWatched) {
    graph.observers.add(std::make_unique<WatchesHandles>());
  }
});

[[maybe_unused]] const bool isHandleOrderBound = bindTests([](pybind11::module_& module) {
  module.def("watch_handles", [](bool on) { areWatched = on; });
  module.def("counts_of_dead_handles", [] { return std::exchange(counts, {}); });
});

}  // namespace
}  // namespace ebb::bindings
