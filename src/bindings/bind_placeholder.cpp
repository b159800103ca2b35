#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "bindings/bindings.h"
#include "memory/share_storage.h"
#include "saved/placeholder.h"

namespace ebb::bindings {

namespace py = pybind11;

void bindPlaceholder(py::module_& module) {
  module.def("share_storage", torch::wrap_pybind_function(&shareStorage));
  py::class_<Placeholder>(module, "Placeholder")
      .def(py::init(torch::wrap_pybind_function([](const at::Tensor& tensor) {
        return std::make_unique<Placeholder>(tensor);
      })))
      .def("discard", torch::wrap_pybind_function(&Placeholder::discard))
      .def("refill", torch::wrap_pybind_function(&Placeholder::refill));
}

}  // namespace ebb::bindings
