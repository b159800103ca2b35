// Policies: the decision for each operator, compiled so that a lookup compares no strings.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ebb/policy.h"
#include "intercept/op_traits.h"

namespace ebb {

// The operators that a policy's rules may name. Registered: operators that are registered when the
// policy is made. Later: also operators that a library registers later. In both cases a rule for
// torch's own operators must match a registered operator; else the constructor throws.
enum class Names { Registered, Later };

struct Verdict {
  static constexpr uint16_t kNoRule = UINT16_MAX;

  Decision decision = Decision::Recompute;
  bool forced = false;      // by a rule with `force`, which overrides Note [Never replayed]
  bool byRule = false;      // a rule matched, not only a default
  uint16_t rule = kNoRule;  // index in the policy
  uint64_t perResult = 0;   // not 0: the decision depends on each result; call decideOn()
};

class Decider;

// See makePolicy. Immutable; shared by threads.
class EBB_API Policy : public std::enable_shared_from_this<Policy> {
 public:
  Policy(
      std::vector<Rule> rules,
      Decision fallback,
      Decision inputs = Decision::Save,
      Names names = Names::Registered);
  Policy(const Policy& first, const Policy& second);
  virtual ~Policy();
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  const std::vector<Rule>& rules() const {
    return rules_;
  }
  Decision fallback() const {
    return alternatives_.front().fallback;
  }
  Decision inputs() const {
    return inputs_;
  }

  // The decider for one region with this policy; shares the policy.
  virtual std::unique_ptr<Decider> activate() const;

  // The rules that match no registered operator, each with a message.
  std::vector<std::pair<const Rule*, std::string>> unmatched() const;

  // True if some rule asks for the running module.
  bool asksForModules() const;

  // True if some rule or default, or the decision for inputs, is this one.
  bool gives(Decision decision) const;

  // A rule that can match an operator, or a default. An operator's candidates are in the policy's
  // order, and the last candidate of each alternative always matches.
  struct Candidate {
    Verdict verdict;
    const Rule* rule;      // null: the default, which always matches
    bool onCall;           // `rule` has a condition on the call
    bool onResult;         // `rule` has a condition on a result
    bool endsAlternative;  // see Note [Policies of several alternatives]
  };
  using Candidates = c10::SmallVector<Candidate, 2>;
  const Candidates& candidates(const OpTraits& op) const;

  bool matchesModule(const Rule& rule, uint32_t module) const;

  // Note [Policies of several alternatives]
  // `either` joins the rules of two policies, first the rules of the first. Each alternative
  // decides by its first matching rule, or by its default. The first decision other than RECOMPUTE
  // counts.
  struct Alternative {
    size_t end;         // index behind the last rule of this alternative
    Decision fallback;  // the decision if no rule matches
  };
  const std::vector<Alternative>& alternatives() const {
    return alternatives_;
  }

 private:
  const Candidates& compile(const OpTraits& op) const;
  Candidates candidatesFor(const OpTraits& op) const;

  std::vector<Rule> rules_;                // with normalised patterns
  std::vector<Alternative> alternatives_;  // at least one
  Decision inputs_;                        // for inputs of regions
  // Note [Compiled policies]
  // A table over OpTraits::index, filled at the first call of each operator. Readers take no lock.
  // An operator beyond the table's end is looked up under the lock each time.
  static constexpr size_t kTableSize = 8192;
  std::unique_ptr<std::atomic<const Candidates*>[]> table_;
  mutable std::mutex mutex_;                                            // guards the members below
  mutable std::deque<Candidates> compiled_;                             // the table points to these
  mutable std::vector<std::pair<uint32_t, const Candidates*>> beyond_;  // indices >= kTableSize
  mutable std::vector<std::vector<int8_t>> modules_;  // by rule, module: 1 yes, -1 no, 0 unknown
};

// A policy in use by one region: decides on the outputs of the region's ops, and counts calls for
// the rules that need counts.
class EBB_API Decider {
 public:
  explicit Decider(PolicyPtr policy);
  virtual ~Decider();

  // Runs for each recorded op and must be fast. Virtual for tests.
  virtual Verdict decide(const OpTraits& op);

  // The verdict on one result of an op. `call` is the verdict on the op's call.
  Verdict decideOn(const OpTraits& op, const at::Tensor& result, const Verdict& call);

  // The verdict on a result that the program has just named; `rule` decided on the result before.
  // Empty if no rule before `rule` matches the name.
  std::optional<Verdict> decideOnNamed(
      const OpTraits& op, const at::Tensor& result, uint16_t rule, const std::string& name);

  // For reports: the deciding rule in words.
  std::string ruleInWords(uint16_t rule) const;
  // For reports: the name of the running module.
  const std::string& module() const;

  // The decision for values that the region reads and that another autograd function computed.
  Decision inputs() const;

 private:
  Verdict decideWith(const OpTraits& op, const Policy::Candidates& candidates);
  bool matchesCall(const Policy::Candidate& candidate);
  uint32_t countCall(const Rule& rule);

  PolicyPtr policy_;
  c10::SmallVector<uint32_t, 4> calls_;  // by rule; empty until a rule counts
  std::map<std::pair<const Rule*, uint32_t>, uint32_t> callsInModule_;  // by rule and module
};

// The operators that a normalised pattern matches. If there are none, throws c10::ValueError with
// the nearest names.
std::vector<std::string> operatorsNamed(const std::string& pattern);

// "aten.mm.default" and "aten::mm.default" both become the latter; "mm" becomes "aten::mm".
std::string normalisedOperatorName(const std::string& name);

// A line for each rule that may decide on calls of `op`, in order, with the rule's conditions.
// Throws c10::ValueError if there is no such operator.
EBB_API std::string explain(const Policy& policy, const std::string& op);

// Example: "rule 2, 'aten::mm', in modules that match '*.mlp'"; Verdict::kNoRule gives "default".
std::string ruleInWords(const Policy& policy, uint16_t rule);

}  // namespace ebb
