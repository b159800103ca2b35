#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "bindings/bindings.h"
#include "plugins/placeholder/placeholder.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

void bindPlaceholder(py::module_& module) {
  py::class_<Placeholder>(module, "Placeholder")
      .def(py::init(torch::wrap_pybind_function([](const at::Tensor& tensor) {
        return std::make_unique<Placeholder>(tensor);
      })))
      .def("discard", torch::wrap_pybind_function(&Placeholder::discard))
      .def("refill", torch::wrap_pybind_function(&Placeholder::refill));
}

[[maybe_unused]] const bool isPlaceholderBound = bindPlugin("placeholder", &bindPlaceholder);

}  // namespace

}  // namespace ebb::bindings
