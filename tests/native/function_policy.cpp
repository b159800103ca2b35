// A policy that is a plain function: it gives a decision for each operator, by name.
#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "ebb/region.h"
#include "hooks/decider.h"
#include "intercept/op_traits.h"
#include "module.h"

namespace ebb::bindings {

namespace py = pybind11;

namespace {

using Decide = std::function<int(const std::string& op)>;  // returns the number of a Decision

class FunctionDecider final : public Decider {
 public:
  explicit FunctionDecider(std::shared_ptr<const Decide> decide) : decide_(std::move(decide)) {}
  Verdict decide(const OpTraits& op) override {
    Verdict verdict;
    verdict.decision = static_cast<Decision>((*decide_)(op.name));
    return verdict;
  }
  std::string ruleInWords(uint16_t rule) const override { return "a function"; }
  const std::string& module() const override {
    static const std::string kNone;
    return kNone;
  }

 private:
  std::shared_ptr<const Decide> decide_;
};

class FunctionPolicy final : public Policy {
 public:
  explicit FunctionPolicy(Decide decide)
      : decide_(std::make_shared<const Decide>(std::move(decide))) {}
  std::unique_ptr<Decider> activate() const override {
    return std::make_unique<FunctionDecider>(decide_);
  }

 private:
  std::shared_ptr<const Decide> decide_;
};

// Runs `program` in a region whose policy is `decide`, and returns its result.
py::object runWithPolicy(Decide decide, const py::function& program) {
  const Region region(std::make_shared<const FunctionPolicy>(std::move(decide)), "function");
  return program();
}

void bindFunctionPolicy(py::module_& module) {
  module.def("run_with_policy", torch::wrap_pybind_function(&runWithPolicy));
}

[[maybe_unused]] const bool isFunctionPolicyBound = bindTests(&bindFunctionPolicy);

}  // namespace

}  // namespace ebb::bindings
