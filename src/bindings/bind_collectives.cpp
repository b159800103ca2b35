#include <torch/csrc/python_headers.h>

#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "plugins/collectives/ranks.h"

namespace ebb::bindings {

namespace {

// Calls a function of repeated_collectives.py.
template <class Result, class... Arguments>
Result callOfRanks(const char* function, const Arguments&... arguments) {
  py::gil_scoped_acquire gil;
  return py::cast<Result>(importFrom("ebb._region.repeated_collectives", function)(arguments...));
}

constexpr CollectivesOfRanks kCollectivesOfRanks{
    .number = [](const std::string& group) { return callOfRanks<uint64_t>("number", group); },
    .tell =
        [](const std::string& group, const std::string& region, const std::string& place,
           const std::string& list) {
          // A thread that ends after the interpreter closes its regions too.
          return Py_IsInitialized() && callOfRanks<bool>("tell", group, region, place, list);
        },
    .compare =
        [](const std::string& group, const std::string& region, const std::string& place,
           const std::string& list, bool always) {
          return callOfRanks<std::string>("compare", group, region, place, list, always);
        },
    .problem = [](const std::string& group) { return callOfRanks<std::string>("problem", group); },
};

}  // namespace

[[maybe_unused]] const bool areCollectivesBound =
    bindPlugin("collectives", [](py::module_&) { setCollectivesOfRanks(kCollectivesOfRanks); });

}  // namespace ebb::bindings
