#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "memory/share_storage.h"
#include "region/enter_region.h"
#include "saved/placeholder.h"

namespace ebb::bindings {

namespace py = pybind11;

void bindRegion(py::module_& module) {
  module.def("in_region", &inRegion);
  module.def("storage_emptied", torch::wrap_pybind_function([](const py::object& storage) {
               storageEmptied(THPStorage_Unpack(storage.ptr()).unsafeGetStorageImpl());
             }));
  module.def("share_storage", torch::wrap_pybind_function(&shareStorage));
  py::class_<Placeholder>(module, "Placeholder")
      .def(py::init(torch::wrap_pybind_function([](const at::Tensor& tensor) {
        return std::make_unique<Placeholder>(tensor);
      })))
      .def("discard", torch::wrap_pybind_function(&Placeholder::discard))
      .def("refill", torch::wrap_pybind_function(&Placeholder::refill));
}

}  // namespace ebb::bindings
