#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <vector>

#include "bindings/bindings.h"
#include "plugins/hooked_inputs/hooked_inputs.h"

namespace ebb::bindings {

[[maybe_unused]] const bool areHookedInputsBound =
    bindPlugin("hooked_inputs", [](py::module_& module) {
      py::class_<HookedInputs, std::shared_ptr<HookedInputs>>(module, "HookedInputs")
          .def(py::init(torch::wrap_pybind_function([](const std::vector<at::Tensor>& tensors) {
            return std::make_shared<HookedInputs>(tensors);
          })))
          .def("enter_region", torch::wrap_pybind_function(&HookedInputs::enterRegion));
    });

}  // namespace ebb::bindings
