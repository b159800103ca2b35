#include "support/python_support.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>

#include "bindings/bindings.h"
#include "saved/handle.h"

namespace ebb::bindings {

namespace {

bool holdsGil() { return Py_IsInitialized() && PyGILState_Check(); }

void* releaseGil() { return PyEval_SaveThread(); }

void acquireGil(void* state) { PyEval_RestoreThread(static_cast<PyThreadState*>(state)); }

py::object wrap(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

// Returns a Python callable and its argument, by which compiled autograd unpacks the saved tensor.
// Compiled autograd releases the handles in autograd's graph before the call. So the argument owns
// another handle of the same saved tensor.
std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> unpackHook(const Handle& handle) {
  py::gil_scoped_acquire gil;
  auto argument = py::capsule(new Handle(handle), "ebb.Handle", [](PyObject* capsule) {
    delete static_cast<Handle*>(PyCapsule_GetPointer(capsule, "ebb.Handle"));
  });
  return std::make_pair(
      c10::SafePyObject(
          importFrom("ebb._region.compiled_autograd", "unpack").release().ptr(),
          getPyInterpreter()),
      c10::SafePyObject(argument.release().ptr(), getPyInterpreter()));
}

std::optional<c10::SafePyObject> flatten(const at::Tensor& tensor, std::vector<at::Tensor>& inner) {
  py::gil_scoped_acquire gil;
  py::object found = importFrom("ebb._support.subclasses", "flatten")(wrap(tensor));
  if (found.is_none()) {
    return std::nullopt;
  }
  const py::tuple pair = found;
  for (const py::handle part : pair[0]) {
    inner.push_back(THPVariable_Unpack(part.ptr()));
  }
  return c10::SafePyObject(py::object(pair[1]).release().ptr(), getPyInterpreter());
}

at::Tensor unflatten(const c10::SafePyObject& parts, const std::vector<at::Tensor>& inner) {
  py::gil_scoped_acquire gil;
  py::list tensors;
  for (const at::Tensor& tensor : inner) {
    tensors.append(wrap(tensor));
  }
  const py::object whole = importFrom("ebb._support.subclasses", "unflatten")(
      py::handle(parts.ptr(getPyInterpreter())), tensors);
  return THPVariable_Unpack(whole.ptr());
}

py::object unpack(const py::capsule& argument) {
  auto* handle = argument.get_pointer<Handle>();
  return wrap(handle->call_unpack_hook());
}

}  // namespace

void installPythonSupport(py::module_& module) {
  module.def("_unpack", &unpack);
  setPythonSupport({&holdsGil, &releaseGil, &acquireGil, &unpackHook, &flatten, &unflatten});
}

}  // namespace ebb::bindings
