#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bind_policy.h"
#include "bindings/bindings.h"
#include "region/region.h"
#include "region/verify_mode.h"

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
  module.def("opaque_write_begins", torch::wrap_pybind_function(&opaqueWriteBegins));
  module.def("opaque_write_ends", torch::wrap_pybind_function(&opaqueWriteEnds));
  module.def(
      "verify_mode", torch::wrap_pybind_function([] { return static_cast<int>(verifyMode()); }));
  module.def("set_verify_mode", torch::wrap_pybind_function([](int mode) {
               return static_cast<int>(setVerifyMode(static_cast<VerifyMode>(mode)));
             }));
}

}  // namespace ebb::bindings
