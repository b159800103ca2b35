#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "bindings/bindings.h"
#include "plugins/placeholder/placeholder.h"

namespace ebb::bindings {

[[maybe_unused]] const bool isPlaceholderBound = bindPlugin("placeholder", [](py::module_& module) {
  py::class_<Placeholder>(module, "Placeholder")
      .def(py::init(torch::wrap_pybind_function([](const at::Tensor& tensor) {
        return std::make_unique<Placeholder>(tensor);
      })))
      .def("discard", torch::wrap_pybind_function(&Placeholder::discard))
      .def("refill", torch::wrap_pybind_function(&Placeholder::refill));
});

}  // namespace ebb::bindings
