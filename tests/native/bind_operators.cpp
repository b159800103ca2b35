// What ebb knows about operators, for tests.
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include "intercept/in_transit.h"
#include "intercept/op_traits.h"
#include "module.h"
#include "policy/glob.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

const char* nameOf(OpKind kind) {
  switch (kind) {
    case OpKind::PassThrough:
      return "passes through";
    case OpKind::InplaceView:
      return "in-place view";
    case OpKind::Recorded:
      return "recorded";
  }
  TORCH_INTERNAL_ASSERT(false);
}

const char* nameOf(ArgUse use) {
  switch (use) {
    case ArgUse::Read:
      return "read";
    case ArgUse::Write:
      return "write";
    case ArgUse::Overwrite:
      return "overwrite";
    case ArgUse::Scratch:
      return "scratch";
    case ArgUse::Unread:
      return "unread";
  }
  TORCH_INTERNAL_ASSERT(false);
}

py::dict operatorFacts(const std::string& name, const std::string& overload) {
  const OpTraits& traits =
      opTraits(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()));
  py::dict uses;
  py::dict counted;
  for (size_t i = 0; i < traits.arguments.types.size(); ++i) {
    if (traits.arguments.types[i] != ArgType::Other) {
      const py::str argument(traits.op.schema().arguments()[i].name());
      uses[argument] = nameOf(traits.arguments.uses[i]);
      counted[argument] = static_cast<bool>(traits.arguments.counted[i]);
    }
  }
  py::dict facts;
  facts["kind"] = nameOf(traits.kind);
  facts["uses"] = uses;
  facts["counted"] = counted;
  facts["random"] = traits.random.draws;
  facts["never_replayed"] = traits.limits.neverReplayed;
  return facts;
}

void bindOperators(py::module_& module) {
  module.def("operator_facts", torch::wrap_pybind_function(&operatorFacts));
  module.def("glob_matches", torch::wrap_pybind_function(&globMatches));
  module.def("is_in_transit", torch::wrap_pybind_function([](const at::Tensor& tensor) {
               return isInTransit(tensor.storage());
             }));
}

[[maybe_unused]] const bool isOperatorsBound = bindTests(&bindOperators);

}  // namespace

}  // namespace ebb::bindings
