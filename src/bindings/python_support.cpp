#include "region/python_support.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bindings/bindings.h"
#include "region/handle.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

bool holdsGil() {
  return Py_IsInitialized() && PyGILState_Check();
}

void* releaseGil() {
  return PyEval_SaveThread();
}

void acquireGil(void* state) {
  PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}

// Compiled autograd wants a Python callable and its argument, and releases the graph's own handles
// before it calls; so the argument owns another handle on the same saved tensor.
std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> unpackHook(const Handle& handle) {
  py::gil_scoped_acquire gil;
  auto argument = py::capsule(new Handle(handle), "ebb.Handle", [](PyObject* capsule) {
    delete static_cast<Handle*>(PyCapsule_GetPointer(capsule, "ebb.Handle"));
  });
  auto function = py::module_::import("ebb._compiled_autograd").attr("unpack");
  return std::make_pair(
      c10::SafePyObject(py::object(function).release().ptr(), getPyInterpreter()),
      c10::SafePyObject(argument.release().ptr(), getPyInterpreter()));
}

py::object unpack(const py::capsule& argument) {
  const auto* handle = argument.get_pointer<const Handle>();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(handle->unpack()));
}

}  // namespace

void installPythonSupport(py::module_& module) {
  module.def("_unpack", &unpack);
  setPythonSupport({&holdsGil, &releaseGil, &acquireGil, &unpackHook});
}

}  // namespace ebb::bindings
