#include "failing_policy.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "intercept/op_traits.h"
#include "policy/compiled_policy.h"
#include "policy/decider.h"

namespace ebb {
namespace {

class FailingDecider final : public Decider {
 public:
  FailingDecider(std::unique_ptr<Decider> real, uint32_t at) : real_(std::move(real)), at_(at) {
  }

  Verdict decide(const OpTraits& op) override {
    TORCH_CHECK(++ops_ != at_, "ebb: fault injected before ", op.name);
    return real_->decide(op);
  }
  Verdict decideOn(const OpTraits& op, const at::Tensor& result, const Verdict& call) override {
    return real_->decideOn(op, result, call);
  }
  std::optional<Verdict> decideOnNamed(
      const OpTraits& op,
      const at::Tensor& result,
      uint16_t rule,
      const std::string& name) override {
    return real_->decideOnNamed(op, result, rule, name);
  }
  std::string ruleInWords(uint16_t rule) const override {
    return real_->ruleInWords(rule);
  }
  const std::string& module() const override {
    return real_->module();
  }
  Decision inputs() const override {
    return real_->inputs();
  }

 private:
  std::unique_ptr<Decider> real_;  // what decides otherwise
  uint32_t at_;                    // the op that fails
  uint32_t ops_ = 0;               // that were asked about
};

class FailingPolicy final : public Policy {
 public:
  explicit FailingPolicy(uint32_t at) : Policy({}, Decision::Recompute), at_(at) {
  }

  std::unique_ptr<Decider> activate() const override {
    return std::make_unique<FailingDecider>(Policy::activate(), at_);
  }

 private:
  uint32_t at_;  // the op that fails
};

}  // namespace

PolicyPtr failingPolicy(uint32_t at) {
  return std::make_shared<const FailingPolicy>(at);
}

}  // namespace ebb
