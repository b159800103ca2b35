// Policies: which decision each operator gets, compiled so that asking costs no string.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ebb/policy.h"
#include "intercept/op_traits.h"
#include "policy/decider.h"

namespace ebb {

// Which operators a policy's rules may name: those that are registered when it is made, or also
// those that a library registers later. A rule for an operator of torch's own must always match.
enum class Names { Registered, Later };

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

  // What decides in one region that has this policy; it shares the policy.
  virtual std::unique_ptr<Decider> activate() const;

  // The rules that match no operator that is registered now, each with that in words.
  std::vector<std::pair<const Rule*, std::string>> unmatched() const;

  // Whether some rule asks for the module that runs.
  bool asksForModules() const;

  // Whether some rule, or what holds without one, gives this decision.
  bool gives(Decision decision) const;

  // The rules that can match one operator, in order, each alternative ending with one that always
  // does.
  struct Candidate {
    Verdict verdict;
    const Rule* rule;      // null: it always matches
    bool onCall;           // `rule` has a condition on the call
    bool onResult;         // `rule` has a condition on a result
    bool endsAlternative;  // see Note [Policies of several alternatives]
  };
  using Candidates = c10::SmallVector<Candidate, 2>;
  const Candidates& candidates(const OpTraits& op) const;

  bool matchesModule(const Rule& rule, uint32_t module) const;

  // Note [Policies of several alternatives]
  // `either` makes a policy of the rules of both, one after the other. Each decides by its
  // first rule that matches, or its default; what counts is the first that does not recompute.
  struct Alternative {
    size_t end;         // of its rules
    Decision fallback;  // when none of them matches
  };
  const std::vector<Alternative>& alternatives() const {
    return alternatives_;
  }

 private:
  const Candidates& compile(const OpTraits& op) const;

  std::vector<Rule> rules_;                // patterns are normalised
  std::vector<Alternative> alternatives_;  // at least one
  Decision inputs_;                        // for what regions read
  // Note [Compiled policies]
  // A table over OpTraits::index, filled at the first call of each operator. Readers take no lock;
  // an operator beyond the table's end is looked up under the lock each time.
  static constexpr size_t kTableSize = 8192;
  std::unique_ptr<std::atomic<const Candidates*>[]> table_;
  mutable std::mutex mutex_;                 // guards compiled_ and beyond_
  mutable std::deque<Candidates> compiled_;  // what the table points to
  mutable std::vector<std::pair<uint32_t, const Candidates*>> beyond_;  // indices >= kTableSize
  mutable std::vector<std::vector<int8_t>> modules_;  // by rule and module: 1 or -1 once known
};

// A policy in use by one region: counts calls for the rules that need it.
class ActivePolicy : public Decider {
 public:
  explicit ActivePolicy(PolicyPtr policy);
  Verdict decide(const OpTraits& op) override;
  Verdict decideOn(const OpTraits& op, const at::Tensor& result, const Verdict& call) override;
  std::optional<Verdict> decideOnNamed(
      const OpTraits& op,
      const at::Tensor& result,
      uint16_t rule,
      const std::string& name) override;
  Decision inputs() const override;
  std::string ruleInWords(uint16_t rule) const override;
  const std::string& module() const override;

 private:
  Verdict decideWith(const OpTraits& op, const Policy::Candidates& candidates);
  bool matchesCall(const Policy::Candidate& candidate);
  uint32_t countCall(const Rule& rule);

  PolicyPtr policy_;                     // the rules
  c10::SmallVector<uint32_t, 4> calls_;  // per rule; empty until something counts
  std::map<std::pair<const Rule*, uint32_t>, uint32_t> callsInModule_;  // by rule and module
};

// The operators that a normalised pattern matches. Throws c10::ValueError if there is none, giving
// the nearest names.
std::vector<std::string> operatorsNamed(const std::string& pattern);

// "aten.mm.default" and "aten::mm.default" both become the latter; "mm" becomes "aten::mm".
std::string normalisedOperatorName(const std::string& name);

}  // namespace ebb
