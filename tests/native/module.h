// What the module ebb._testing is made of; module.cpp calls these.
#pragma once

#include <torch/csrc/python_headers.h>

#include <pybind11/pybind11.h>

namespace ebb::bindings {

void bindOperators(pybind11::module_& module);
void bindPages(pybind11::module_& module);
void bindTesting(pybind11::module_& module);

}  // namespace ebb::bindings
