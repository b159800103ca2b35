// Policies: the decision for each operator, compiled so that a lookup compares no strings.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ebb/policy.h"
#include "hooks/decider.h"
#include "intercept/op_traits.h"

namespace ebb {

// The operators that a policy's rules may name. Registered: operators that are registered when the
// policy is made. Later: also operators that a library registers later. In both cases a rule for
// torch's own operators must match a registered operator; else the constructor throws.
enum class Names { Registered, Later };

class RulePolicy;

// Example: "rule 2, 'aten::mm', in modules that match '*.mlp'"; Verdict::kNoRule gives "default".
EBB_API std::string ruleInWords(const RulePolicy& policy, uint16_t rule);

// See makePolicy. Immutable; shared by threads.
class EBB_API RulePolicy : public Policy {
 public:
  RulePolicy(
      std::vector<Rule> rules, Decision fallback, Decision inputs = Decision::Save,
      Names names = Names::Registered);

  const std::vector<Rule>& rules() const { return rules_; }
  Decision fallback() const { return fallback_; }
  Decision inputs() const { return inputs_; }

  std::unique_ptr<Decider> activate() const override;
  std::vector<std::string> rulesInWords() const override;

  // The rules that match no registered operator, each with a message.
  std::vector<std::pair<const Rule*, std::string>> unmatched() const;

  // True if some rule asks for the running module.
  bool asksForModules() const;

  // True if some rule or default, or the decision for inputs, is this one.
  bool gives(Decision decision) const;

  // A rule that can match an operator, or the default. An operator's candidates are in the policy's
  // order, and the last one always matches.
  struct Candidate {
    Verdict verdict;
    const Rule* rule;  // null: the default
    bool onCall;       // `rule` has a condition on the call
    bool onResult;     // `rule` has a condition on a result
  };
  using Candidates = c10::SmallVector<Candidate, 2>;
  const Candidates& candidates(const OpTraits& op) const;
  Candidates candidatesFor(const std::string& op) const;

  bool matchesModule(const Rule& rule, uint32_t module) const;

 private:
  const Candidates& compile(const OpTraits& op) const;

  std::vector<Rule> rules_;  // with normalised patterns
  Decision fallback_;        // the decision if no rule matches
  Decision inputs_;          // for inputs of regions
  bool stores_;              // some decision needs a store
  // Note [Compiled policies]
  // A table over OpTraits::index, filled at the first call of each operator. Readers take no lock.
  // An operator beyond the table's end is looked up under the lock each time.
  static constexpr size_t kTableSize = 8192;
  std::unique_ptr<std::atomic<const Candidates*>[]> table_;
  mutable std::mutex mutex_;                          // guards the members below
  mutable std::map<uint32_t, Candidates> compiled_;   // by index; the table points to these
  mutable std::vector<std::vector<int8_t>> modules_;  // by rule, module: 1 yes, -1 no, 0 unknown
};

// Counts calls for the rules that need counts.
class EBB_API RuleDecider : public Decider {
 public:
  explicit RuleDecider(std::shared_ptr<const RulePolicy> policy) : policy_(std::move(policy)) {}

  Verdict decide(const OpTraits& op) override;
  Verdict decideOn(const OpTraits& op, const at::Tensor& result, const Verdict& call) override;
  std::optional<Verdict> decideOnNamed(
      const OpTraits& op, const at::Tensor& result, uint16_t rule,
      const std::string& name) override;
  Decision inputs() const override { return policy_->inputs(); }
  std::string ruleInWords(uint16_t rule) const override { return ebb::ruleInWords(*policy_, rule); }
  const std::string& module() const override;

 private:
  Verdict decideWith(const RulePolicy::Candidates& candidates);
  bool matchesCall(const RulePolicy::Candidate& candidate);
  uint32_t countCall(const Rule& rule);

  std::shared_ptr<const RulePolicy> policy_;
  c10::SmallVector<uint32_t, 4> calls_;  // by rule; empty until a rule counts
  std::map<std::pair<const Rule*, uint32_t>, uint32_t> callsInModule_;  // by rule and module
};

// The rules of a policy. Throws c10::ValueError if the policy has none.
EBB_API const RulePolicy& rulesOf(const PolicyPtr& policy);

// The operators that a normalised pattern matches. If there are none, throws c10::ValueError with
// the nearest names.
std::vector<std::string> operatorsNamed(const std::string& pattern);

// "aten.mm.default" and "aten::mm.default" both become the latter; "mm" becomes "aten::mm".
std::string normalisedOperatorName(const std::string& name);

// A line for each rule that may decide on calls of `op`, in order, with the rule's conditions.
// Throws c10::ValueError if there is no such operator.
EBB_API std::string explain(const RulePolicy& policy, const std::string& op);

}  // namespace ebb
