#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>

#include "bindings/bind_policy.h"
#include "bindings/bindings.h"
#include "region/policy.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

// Errors of the core become the Python exceptions that their kind names.
template <class F>
auto translated(F&& f) {
  return torch::wrap_pybind_function(std::forward<F>(f));
}

Decision toDecision(int value) {
  return static_cast<Decision>(value);
}

PyPolicy makePolicy(
    const std::vector<std::tuple<std::string, int, uint32_t, bool>>& rules,
    int fallback,
    int inputs) {
  std::vector<Rule> compiled;
  for (const auto& [op, decision, every, force] : rules) {
    compiled.push_back({op, toDecision(decision), every, force});
  }
  return {makePolicy(std::move(compiled), toDecision(fallback), toDecision(inputs))};
}

// (op, decision, every, force) of each rule.
std::vector<std::tuple<std::string, int, uint32_t, bool>> rulesOf(const PyPolicy& policy) {
  std::vector<std::tuple<std::string, int, uint32_t, bool>> rules;
  for (const Rule& rule : policy.policy->rules()) {
    rules.emplace_back(rule.op, static_cast<int>(rule.decision), rule.every, rule.force);
  }
  return rules;
}

}  // namespace

void bindPolicy(py::module_& module) {
  py::class_<PyPolicy>(module, "Policy")
      .def(
          py::init(translated(&makePolicy)),
          py::arg("rules"),
          py::arg("fallback"),
          py::arg("inputs"))
      .def("rules", &rulesOf)
      .def(
          "inputs",
          [](const PyPolicy& policy) { return static_cast<int>(policy.policy->inputs()); })
      .def("fallback", [](const PyPolicy& policy) {
        return static_cast<int>(policy.policy->fallback());
      });
  module.def("failing_policy", [](uint32_t at) {
    return PyPolicy{std::make_shared<const Policy>(
        std::vector<Rule>{}, Decision::Recompute, Decision::Save, at)};
  });
  module.def("recompute_all", [] { return PyPolicy{recomputeAll()}; });
  module.def("save_all", [] { return PyPolicy{saveAll()}; });
  module.def("save_matmuls", [] { return PyPolicy{saveMatmuls()}; });
  module.def("torchtitan", [] { return PyPolicy{torchtitan()}; });
  module.def("offload_inputs", [] { return PyPolicy{offloadInputs()}; });
}

}  // namespace ebb::bindings
