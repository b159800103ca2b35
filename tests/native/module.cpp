#include "module.h"

#include <vector>

namespace {

using Bind = void (*)(pybind11::module_& module);

std::vector<Bind>& tests() {
  static auto* all = new std::vector<Bind>;
  return *all;
}

}  // namespace

bool ebb::bindings::bindTests(void (*bind)(pybind11::module_& module)) {
  tests().push_back(bind);
  return true;
}

// Its functions rely on the GIL, as those of ebb._C do.
PYBIND11_MODULE(_testing, module, pybind11::mod_gil_not_used(false)) {
  module.doc() = "What only ebb's own tests and benchmarks use.";
  pybind11::module_::import("ebb._C");  // has the type of policies
  for (const Bind bind : tests()) {
    bind(module);
  }
}
