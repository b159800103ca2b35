// One function for each concept, in a file of its own; module.cpp calls all of them.
#pragma once

#include <torch/csrc/python_headers.h>

#include <pybind11/pybind11.h>

#include "ebb/policy.h"

namespace ebb::bindings {

namespace py = pybind11;

// The Python class of policies.
struct PyPolicy {
  PolicyPtr policy;  // shared with the regions that use the policy
};

// `name` of a Python module, which is imported if it is not yet. The caller holds the GIL.
inline py::object importFrom(const char* module, const char* name) {
  return py::module_::import(module).attr(name);
}

void bindCounts(py::module_& module);
void bindPolicy(py::module_& module);
void bindRegion(py::module_& module);
void bindScopes(py::module_& module);
void bindWatchedFunctions(py::module_& module);

// The file of a plug-in is built with its plug-in only, so it registers its function when the
// module is loaded. Returns true.
bool bindPlugin(const char* name, void (*bind)(py::module_& module));

// From now on SIGUSR1 calls the Python function, and SIGTERM calls it before it ends the process.
// Has no effect on a signal that the program handles or ignores. None restores the default effect
// of both signals. See Note [Signals].
void reportOnSignals(const py::object& function);

// Gives the core its Python callbacks.
void installPythonSupport(py::module_& module);

}  // namespace ebb::bindings
