#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "region/enter_region.h"

namespace ebb::bindings {

void bindRegion(py::module_& module) {
  module.def("in_region", &inRegion);
  module.def("storage_emptied", torch::wrap_pybind_function([](const py::object& storage) {
               storageEmptied(THPStorage_Unpack(storage.ptr()).unsafeGetStorageImpl());
             }));
}

}  // namespace ebb::bindings
