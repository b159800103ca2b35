#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "plugins/offload/offload_engine.h"

namespace ebb::bindings {

namespace {

// True if `attribute` exists and is true. Unlike hasattr and getattr, does not raise and catch an
// exception if the attribute is missing, the usual case.
bool isTrue(PyObject* object, PyObject* attribute) {
  PyObject* found = nullptr;
  const int there = PyObject_GetOptionalAttr(object, attribute, &found);
  const auto value = py::reinterpret_steal<py::object>(found);
  const int truth = there > 0 ? PyObject_IsTrue(value.ptr()) : there;
  if (truth < 0) {
    throw python_error();
  }
  return truth != 0;
}

// True if `tensor` has an attribute by which users of other libraries keep tensors on the device.
bool optedOut(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj() == nullptr) {
    return false;  // never seen by Python
  }
  py::gil_scoped_acquire gil;
  static PyObject* const marks[] = {
      PyUnicode_InternFromString("_do_not_offload"),
      PyUnicode_InternFromString("_TE_do_not_offload")};
  const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  return isTrue(object.ptr(), marks[0]) || isTrue(object.ptr(), marks[1]);
}

}  // namespace

[[maybe_unused]] const bool isOffloadBound = bindPlugin("offload", [](py::module_& module) {
  setOffloadOptOut(&optedOut);
  module.def("offload_settings", torch::wrap_pybind_function(&offloadSettings));
  module.def("offload_stats", torch::wrap_pybind_function(&offloadStats));
  module.def("configure_offload", torch::wrap_pybind_function(&configureOffload));
});

}  // namespace ebb::bindings
