#include <torch/csrc/Exceptions.h>

#include "bindings/bind_policy.h"
#include "bindings/bindings.h"
#include "region/region.h"

namespace ebb::bindings {

namespace py = pybind11;

void bindRegion(py::module_& module) {
  // Tokens are plain integers: the cheapest thing to hand to Python and back.
  module.def(
      "enter_region",
      torch::wrap_pybind_function([](const PyPolicy& policy, const std::string& name) {
        return enterRegion(policy.policy, name).id;
      }));
  module.def("leave_region", torch::wrap_pybind_function([](uint64_t id) {
               leaveRegion(RegionToken{id});
             }));
  module.def("in_region", &inRegion);
}

}  // namespace ebb::bindings
