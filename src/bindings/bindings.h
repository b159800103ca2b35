// One function for each concept, in a file of its own; module.cpp calls all of them.
#pragma once

#include <torch/csrc/python_headers.h>

#include <pybind11/pybind11.h>

#include "ebb/policy.h"

namespace ebb::bindings {

// The Python class of policies.
struct PyPolicy {
  PolicyPtr policy;  // shared with the regions that use the policy
};

// `name` of a Python module, which is imported if it is not yet. The caller holds the GIL.
inline pybind11::object importFrom(const char* module, const char* name) {
  return pybind11::module_::import(module).attr(name);
}

void bindCounts(pybind11::module_& module);
void bindPolicy(pybind11::module_& module);
void bindRegion(pybind11::module_& module);
void bindScopes(pybind11::module_& module);
void bindWatchedFunctions(pybind11::module_& module);

// The file of a plug-in is built with its plug-in only, so it registers its function when the
// module is loaded. Returns true.
bool bindPlugin(const char* name, void (*bind)(pybind11::module_& module));

// Gives the core its Python callbacks.
void installPythonSupport(pybind11::module_& module);

}  // namespace ebb::bindings
