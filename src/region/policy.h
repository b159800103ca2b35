// Policies: which decision each operator gets, compiled so that asking costs no string.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "graph/decision.h"
#include "intercept/op_traits.h"

namespace ebb {

// One line of a policy.
struct Rule {
  std::string op;     // "aten::mm" (all overloads), "aten::mm.default", "aten.mm", or a glob
  Decision decision = Decision::Recompute;
  uint32_t every = 1;  // match only each n-th call of the operators it names, per region
  bool force = false;  // also for ops that are never replayed; `op` must name them exactly
};

// An ordered list of rules, the first that matches decides, and a default. Immutable; shared by
// threads.
class EBB_API Policy {
 public:
  // Throws ValueError (c10::ValueError) for a rule that names no registered operator, giving the
  // nearest names, and NotImplementedError for a decision that is not built yet.
  Policy(std::vector<Rule> rules, Decision fallback);
  ~Policy();
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  const std::vector<Rule>& rules() const {
    return rules_;
  }
  Decision fallback() const {
    return fallback_;
  }

  // The rules that can match one operator, in order, ending with one that always does.
  struct Candidate {
    Verdict verdict;
    uint32_t every;  // 1: always
    uint32_t rule;   // counts calls under this index
  };
  using Candidates = c10::SmallVector<Candidate, 2>;
  const Candidates& candidates(const OpTraits& op) const;

 private:
  const Candidates& compile(const OpTraits& op) const;

  std::vector<Rule> rules_;  // patterns are normalised
  Decision fallback_;        // when no rule matches
  // Note [Compiled policies]
  // A table over OpTraits::index, filled at the first call of each operator. Readers take no lock;
  // an operator beyond the table's end is looked up under the lock each time.
  static constexpr size_t kTableSize = 8192;
  std::unique_ptr<std::atomic<const Candidates*>[]> table_;
  mutable std::mutex mutex_;                // guards compiled_ and beyond_
  mutable std::deque<Candidates> compiled_;  // what the table points to
  mutable std::vector<std::pair<uint32_t, const Candidates*>> beyond_;  // indices >= kTableSize
};

// A policy in use by one region: counts calls for the rules that need it.
class ActivePolicy final : public Decider {
 public:
  explicit ActivePolicy(std::shared_ptr<const Policy> policy);
  Verdict decide(const OpTraits& op) override;

 private:
  std::shared_ptr<const Policy> policy_;
  c10::SmallVector<uint32_t, 4> calls_;  // per rule; empty until a rule counts
};

// "aten.mm.default" and "aten::mm.default" both become the latter.
std::string normalisedOperatorName(const std::string& name);

}  // namespace ebb
