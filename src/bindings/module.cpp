#include <c10/util/Exception.h>

#include <map>
#include <string>

#include "allocator/shortage.h"
#include "bindings/bindings.h"
#include "intercept/install.h"

namespace py = pybind11;

namespace {

using Plugins = std::map<std::string, void (*)(py::module_&)>;

Plugins& plugins() {
  static auto* all = new Plugins;
  return *all;
}

// Binds the plug-ins of this build. Python code that uses a function of another plug-in gets an
// AttributeError that lists the plug-ins of this build.
void bindPlugins(py::module_& module) {
  std::string built;
  for (const auto& [name, bind] : plugins()) {
    bind(module);
    built += (built.empty() ? "" : ", ") + name;
  }
  module.attr("plugins") = built;
  module.attr("__getattr__") = py::cpp_function([built](const std::string& name) -> py::object {
    throw py::attribute_error(
        "ebb._C has no '" + name + "'. ebb was built with these plug-ins: " +
        (built.empty() ? "none" : built) + " (-DEBB_PLUGINS)");
  });
}

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

bool ebb::bindings::bindPlugin(const char* name, void (*bind)(py::module_& module)) {
  return plugins().emplace(name, bind).second;
}

// The bindings rely on the GIL, so a free-threaded Python enables the GIL on import.
PYBIND11_MODULE(_C, module, py::mod_gil_not_used(false)) {
  module.doc() = "ebb's C++ part. Use the package `ebb`; nothing here is public.";
  module.attr("compiler") = EBB_COMPILER;
  module.attr("torch_release") = EBB_TORCH_RELEASE;
  ebb::bindings::installPythonSupport(module);
  ebb::bindings::bindCounts(module);
  ebb::bindings::bindPolicy(module);
  ebb::bindings::bindRegion(module);
  ebb::bindings::bindScopes(module);
  ebb::bindings::bindWatchedFunctions(module);
  bindPlugins(module);
  installAtImport();
  ebb::listenToCudaAllocator();
}
