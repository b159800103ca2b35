#include "module.h"

// Its functions rely on the GIL, as those of ebb._C do.
PYBIND11_MODULE(_testing, module, pybind11::mod_gil_not_used(false)) {
  module.doc() = "What only ebb's own tests and benchmarks use.";
  pybind11::module_::import("ebb._C");  // has the type of policies
  ebb::bindings::bindOperators(module);
  ebb::bindings::bindPages(module);
  ebb::bindings::bindTesting(module);
}
