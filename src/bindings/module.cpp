#include <c10/util/Exception.h>

#include "bindings/bindings.h"
#include "intercept/install.h"
#include "memory/shortage.h"

namespace {

// torch exchanges the kernels of an operator without a lock, so no other thread may dispatch the
// operator meanwhile. When Python imports ebb, fewer threads run than at the first region. If
// another library owns the dispatch key, each entry to a region raises the error again.
void installAtImport() {
  try {
    ebb::installInterception();
  } catch (const c10::Error&) {
  }
}

}  // namespace

// The bindings rely on the GIL, so a free-threaded Python enables the GIL on import.
PYBIND11_MODULE(_C, module, pybind11::mod_gil_not_used(false)) {
  module.doc() = "ebb's C++ part. Use the package `ebb`; nothing here is public.";
  module.attr("compiler") = EBB_COMPILER;
  module.attr("torch_release") = EBB_TORCH_RELEASE;
  ebb::bindings::installPythonSupport(module);
  ebb::bindings::bindAhead(module);
  ebb::bindings::bindOffload(module);
  ebb::bindings::bindPaging(module);
  ebb::bindings::bindPolicy(module);
  ebb::bindings::bindRegion(module);
  ebb::bindings::bindReport(module);
  ebb::bindings::bindScopes(module);
  ebb::bindings::bindWatchedFunctions(module);
  installAtImport();
  ebb::listenToCudaAllocator();
}
