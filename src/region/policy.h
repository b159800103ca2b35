// Policies: which decision each operator gets, compiled so that asking costs no string.
#pragma once

#include <c10/util/SmallVector.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ebb/ebb.h"
#include "graph/decider.h"
#include "intercept/op_traits.h"

namespace ebb {

// See makePolicy. Immutable; shared by threads.
class EBB_API Policy {
 public:
  // With `faultAt`, the region's n-th op throws before it runs: for tests of what that leaves
  // behind.
  Policy(
      std::vector<Rule> rules,
      Decision fallback,
      Decision inputs = Decision::Save,
      uint32_t faultAt = 0);
  ~Policy();
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  const std::vector<Rule>& rules() const {
    return rules_;
  }
  Decision fallback() const {
    return fallback_;
  }
  Decision inputs() const {
    return inputs_;
  }
  uint32_t faultAt() const {
    return faultAt_;
  }

  // The rules that can match one operator, in order, ending with one that always does.
  struct Candidate {
    Verdict verdict;
    uint32_t every;  // 1: always; 0: it never decides, but throws at Policy::faultAt
    uint32_t rule;   // counts calls under this index
  };
  using Candidates = c10::SmallVector<Candidate, 2>;
  const Candidates& candidates(const OpTraits& op) const;

 private:
  const Candidates& compile(const OpTraits& op) const;

  std::vector<Rule> rules_;  // patterns are normalised
  Decision fallback_;        // when no rule matches
  Decision inputs_;          // for what regions read
  uint32_t faultAt_;         // 0: never
  // Note [Compiled policies]
  // A table over OpTraits::index, filled at the first call of each operator. Readers take no lock;
  // an operator beyond the table's end is looked up under the lock each time.
  static constexpr size_t kTableSize = 8192;
  std::unique_ptr<std::atomic<const Candidates*>[]> table_;
  mutable std::mutex mutex_;                 // guards compiled_ and beyond_
  mutable std::deque<Candidates> compiled_;  // what the table points to
  mutable std::vector<std::pair<uint32_t, const Candidates*>> beyond_;  // indices >= kTableSize
};

// A policy in use by one region: counts calls for the rules that need it.
class ActivePolicy final : public Decider {
 public:
  explicit ActivePolicy(PolicyPtr policy);
  Verdict decide(const OpTraits& op) override;
  Decision inputs() const override;

 private:
  PolicyPtr policy_;                     // the rules
  c10::SmallVector<uint32_t, 4> calls_;  // per rule, and of all ops; empty until something counts
};

// "aten.mm.default" and "aten::mm.default" both become the latter.
std::string normalisedOperatorName(const std::string& name);

}  // namespace ebb
