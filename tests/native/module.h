// Registers the functions of the module ebb._testing.
#pragma once

#include <torch/csrc/python_headers.h>

#include <pybind11/pybind11.h>

namespace ebb::bindings {

// Each file with functions for tests registers its own function when the module is loaded. Files in
// the folder plugins are built only with all plug-ins. Returns true.
bool bindTests(void (*bind)(pybind11::module_& module));

}  // namespace ebb::bindings
