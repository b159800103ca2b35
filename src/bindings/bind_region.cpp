#include <ATen/SavedTensorHooks.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/bind_policy.h"
#include "bindings/bindings.h"
#include "region/region.h"
#include "region/verify_mode.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

// Entering and leaving are plain C functions: they run around every block of a model, and pybind's
// argument handling would cost more than they do.

// enter_region(policy, name) -> id of the entry, negative where saved-tensor hooks are disabled.
PyObject* enter(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK(count == 2, "ebb: enter_region takes a policy and a name");
  const auto& policy = py::handle(arguments[0]).cast<const PyPolicy&>();
  Py_ssize_t size = 0;
  const char* name = PyUnicode_AsUTF8AndSize(arguments[1], &size);
  if (name == nullptr) {
    throw python_error();
  }
  const bool hooksDisabled = !at::SavedTensorDefaultHooks::is_enabled();
  const auto id = static_cast<long long>(
      enterRegion(policy.policy, std::string(name, static_cast<size_t>(size))).id);
  return PyLong_FromLongLong(hooksDisabled ? -id : id);
  END_HANDLE_TH_ERRORS
}

PyObject* leave(PyObject*, PyObject* id) {
  HANDLE_TH_ERRORS
  const long long entry = PyLong_AsLongLong(id);
  if (entry == -1 && PyErr_Occurred() != nullptr) {
    throw python_error();
  }
  leaveRegion(RegionToken{static_cast<uint64_t>(entry)});
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// CPython's declared type of a METH_FASTCALL function is another one than its real type.
PyMethodDef regionMethods[] = {
    {"enter_region",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&enter)),
     METH_FASTCALL,
     nullptr},
    {"leave_region", &leave, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bindRegion(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), regionMethods) != 0) {
    throw py::error_already_set();
  }
  module.def("in_region", &inRegion);
  py::class_<Graph, c10::intrusive_ptr<Graph>>(module, "Escapes")
      .def("refill", torch::wrap_pybind_function(&refill));
  module.def(
      "leave_region_emptying_escapes",
      torch::wrap_pybind_function([](uint64_t id,
                                     const std::vector<at::Tensor>& results,
                                     bool onlyResults,
                                     bool hasBackward) {
        return leaveRegionEmptyingEscapes({id}, results, onlyResults, hasBackward);
      }));
  module.def("opaque_write_begins", torch::wrap_pybind_function_no_gil(&opaqueWriteBegins));
  module.def("opaque_write_ends", torch::wrap_pybind_function_no_gil(&opaqueWriteEnds));
  module.def(
      "verify_mode", torch::wrap_pybind_function([] { return static_cast<int>(verifyMode()); }));
  module.def("set_verify_mode", torch::wrap_pybind_function([](int mode) {
               return static_cast<int>(setVerifyMode(static_cast<VerifyMode>(mode)));
             }));
}

}  // namespace ebb::bindings
