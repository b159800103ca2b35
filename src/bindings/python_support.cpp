#include "region/python_support.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bindings/bindings.h"
#include "region/handle.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

// Set at import, never freed: handles may outlive the interpreter's modules.
PyObject* unpackFunction = nullptr;

bool holdsGil() {
  return Py_IsInitialized() && PyGILState_Check();
}

void* releaseGil() {
  return PyEval_SaveThread();
}

void acquireGil(void* state) {
  PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}

// Compiled autograd wants a Python callable and its argument. The argument borrows the handle,
// which the graph keeps alive while compiled autograd traces and runs that graph.
std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> unpackHook(const Handle& handle) {
  py::gil_scoped_acquire gil;
  auto argument = py::capsule(&handle, "ebb.Handle");
  Py_INCREF(unpackFunction);
  return std::make_pair(
      c10::SafePyObject(unpackFunction, getPyInterpreter()),
      c10::SafePyObject(argument.release().ptr(), getPyInterpreter()));
}

py::object unpack(const py::capsule& argument) {
  const auto* handle = argument.get_pointer<const Handle>();
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(handle->unpack()));
}

}  // namespace

void installPythonSupport(py::module_& module) {
  module.def("_unpack", &unpack);
  unpackFunction = py::object(module.attr("_unpack")).release().ptr();
  setPythonSupport({&holdsGil, &releaseGil, &acquireGil, &unpackHook});
}

}  // namespace ebb::bindings
