#include "failing_policy.h"

#include <memory>
#include <utility>

#include "intercept/op_traits.h"
#include "policy/compiled_policy.h"

namespace ebb {
namespace {

class FailingDecider final : public RuleDecider {
 public:
  FailingDecider(std::shared_ptr<const RulePolicy> policy, uint32_t at)
      : RuleDecider(std::move(policy)), at_(at) {}

  Verdict decide(const OpTraits& op) override {
    TORCH_CHECK(++ops_ != at_, "ebb: fault injected before ", op.name);
    return RuleDecider::decide(op);
  }

 private:
  uint32_t at_;       // the op that fails
  uint32_t ops_ = 0;  // that were asked about
};

class FailingPolicy final : public RulePolicy {
 public:
  explicit FailingPolicy(uint32_t at) : RulePolicy({}, Decision::Recompute), at_(at) {}

  std::unique_ptr<Decider> activate() const override {
    return std::make_unique<FailingDecider>(
        std::static_pointer_cast<const RulePolicy>(shared_from_this()), at_);
  }

 private:
  uint32_t at_;  // the op that fails
};

}  // namespace

PolicyPtr failingPolicy(uint32_t at) { return std::make_shared<const FailingPolicy>(at); }

}  // namespace ebb
