#include <torch/csrc/Exceptions.h>

#include "bindings/bindings.h"
#include "bindings/field_dicts.h"
#include "ebb/region.h"
#include "policy/compiled_policy.h"
#include "policy/module_scope.h"

template <>
struct pybind11::detail::type_caster<ebb::Decision> : ebb::bindings::NumberCaster<ebb::Decision> {};

namespace ebb::bindings {

namespace {

PyPolicy makePolicy(const std::vector<Rule>& rules, Decision fallback, Decision inputs, bool late) {
  return {std::make_shared<const RulePolicy>(
      rules, fallback, inputs, late ? Names::Later : Names::Registered)};
}

void bindRule(py::module_& module) {
  py::class_<Rule>(module, "Rule")
      .def(
          py::init<
              std::string, Decision, uint32_t, bool, uint32_t, bool, std::string, std::string,
              size_t, size_t, std::optional<at::ScalarType>, bool>())
      .def_readonly("op", &Rule::op)
      .def_readonly("decision", &Rule::decision)
      .def_readonly("every", &Rule::every)
      .def_readonly("force", &Rule::force)
      .def_readonly("nth", &Rule::nth)
      .def_readonly("per_module", &Rule::perModule)
      .def_readonly("module", &Rule::module)
      .def_readonly("name", &Rule::name)
      .def_readonly("min_bytes", &Rule::minBytes)
      .def_readonly("max_bytes", &Rule::maxBytes)
      .def_readonly("dtype", &Rule::dtype)
      .def_readonly("preset", &Rule::preset);
}

std::vector<std::string> unmatchedOf(const PyPolicy& policy) {
  std::vector<std::string> messages;
  for (const auto& [rule, message] : rulesOf(policy.policy).unmatched()) {
    messages.push_back(message);
  }
  return messages;
}

void bindPolicyClass(py::module_& module) {
  py::class_<PyPolicy>(module, "Policy")
      .def(
          py::init(torch::wrap_pybind_function(&makePolicy)), py::arg("rules"), py::arg("fallback"),
          py::arg("inputs"), py::arg("late") = false)
      .def("rules", [](const PyPolicy& policy) { return rulesOf(policy.policy).rules(); })
      .def("fallback", [](const PyPolicy& policy) { return rulesOf(policy.policy).fallback(); })
      .def("unmatched", &unmatchedOf)
      .def(
          "asks_for_modules",
          [](const PyPolicy& policy) { return rulesOf(policy.policy).asksForModules(); })
      .def(
          "gives", [](const PyPolicy& policy,
                      Decision given) { return rulesOf(policy.policy).gives(given); })
      .def(
          "explain", torch::wrap_pybind_function([](const PyPolicy& policy, const std::string& op) {
            return explain(rulesOf(policy.policy), op);
          }))
      .def("inputs", [](const PyPolicy& policy) { return rulesOf(policy.policy).inputs(); });
}

}  // namespace

void bindPolicy(py::module_& module) {
  module.def("any_module_has_number", &anyModuleHasNumber);
  module.def("module_number", [](std::string plain, std::string full) {
    return moduleNumber({std::move(plain), std::move(full)});
  });
  module.def("name_value", torch::wrap_pybind_function_no_gil(&nameValue));
  bindRule(module);
  bindPolicyClass(module);
  const auto preset = [&](const char* name, PolicyPtr (*make)()) {
    module.def(name, [make] { return PyPolicy{make()}; });
  };
  preset("recompute_all", &recomputeAll);
  preset("save_all", &saveAll);
  preset("save_matmuls", &saveMatmuls);
  preset("torchtitan", &torchtitan);
  preset("dots_saveable", &dotsSaveable);
  preset("dots_with_no_batch_dims_saveable", &dotsWithNoBatchDimsSaveable);
  preset("offload_inputs", &offloadInputs);
  preset("recompute_collectives", &recomputeCollectives);
}

}  // namespace ebb::bindings
