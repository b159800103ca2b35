// One function per concept, each in its own file; module.cpp calls them.
#pragma once

#include <torch/csrc/python_headers.h>

#include <pybind11/pybind11.h>

namespace ebb::bindings {

void bindAhead(pybind11::module_& module);
void bindOffload(pybind11::module_& module);
void bindPaging(pybind11::module_& module);
void bindPlaceholder(pybind11::module_& module);
void bindPolicy(pybind11::module_& module);
void bindRegion(pybind11::module_& module);
void bindReport(pybind11::module_& module);
void bindScopes(pybind11::module_& module);
void bindWatchedFunctions(pybind11::module_& module);

// Gives the core what it needs of Python.
void installPythonSupport(pybind11::module_& module);

}  // namespace ebb::bindings
