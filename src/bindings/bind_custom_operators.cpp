#include <torch/csrc/python_headers.h>

#include <pybind11/pybind11.h>

#include "bindings/bindings.h"
#include "plugins/custom_operators/python_calls.h"

namespace ebb::bindings {

namespace {

// Called when a region has ended. An error in logging must not break the region.
void tell(const std::string& op, const std::string& region, size_t bytes) {
  if (!Py_IsInitialized()) {
    return;
  }
  py::gil_scoped_acquire gil;
  try {
    importFrom("ebb._support.pinned", "tell")(op, region, bytes);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable(__func__);
  }
}

}  // namespace

[[maybe_unused]] const bool areCustomOperatorsBound =
    bindPlugin("custom_operators", [](py::module_&) {
      hasEffect = [](const std::string& op) {
        py::gil_scoped_acquire gil;
        return py::cast<bool>(importFrom("ebb._support.effects", "has_effect")(op));
      };
      tellKept = &tell;
    });

}  // namespace ebb::bindings
