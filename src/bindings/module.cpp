#include "bindings/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "ebb's C++ part. Use the package `ebb`; nothing here is public.";
  module.attr("compiler") = EBB_COMPILER;
  module.attr("torch_release") = EBB_TORCH_RELEASE;
  ebb::bindings::installPythonSupport(module);
  ebb::bindings::bindOffload(module);
  ebb::bindings::bindPages(module);
  ebb::bindings::bindPaging(module);
  ebb::bindings::bindPlaceholder(module);
  ebb::bindings::bindPolicy(module);
  ebb::bindings::bindRegion(module);
  ebb::bindings::bindReport(module);
}
