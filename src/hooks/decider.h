// The interface of a policy: decides where the results of ops are between forward and backward.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ebb/policy.h"

namespace ebb {

struct OpTraits;

struct Verdict {
  static constexpr uint16_t kNoRule = UINT16_MAX;

  Decision decision = Decision::Recompute;
  bool forced = false;      // by a rule with `force`, which overrides Note [Never replayed]
  bool byRule = false;      // a rule matched, not only a default
  uint16_t rule = kNoRule;  // index in the policy
  uint64_t perResult = 0;   // not 0: the decision depends on each result; call decideOn()
};

// A policy in use by one region, on the region's thread.
class EBB_API Decider {
 public:
  virtual ~Decider() = default;

  // The verdict on a call of an op. Runs for each recorded op and must be fast.
  virtual Verdict decide(const OpTraits& op) = 0;

  // The verdict on one result of an op. `call` is the verdict on the op's call.
  virtual Verdict decideOn(const OpTraits& op, const at::Tensor& result, const Verdict& call) {
    return call;
  }

  // The verdict on a result that the program has just named; `rule` decided on the result before.
  // Empty if the name changes nothing.
  virtual std::optional<Verdict> decideOnNamed(
      const OpTraits& op, const at::Tensor& result, uint16_t rule, const std::string& name) {
    return {};
  }

  // The decision for values that the region reads and that another autograd function computed:
  // SAVE, or a decision that has a store.
  virtual Decision inputs() const { return Decision::Save; }

  // For reports: the deciding rule in words.
  virtual std::string ruleInWords(uint16_t rule) const = 0;
  // For reports: the name of the running module.
  virtual const std::string& module() const = 0;
};

// Shared by threads and regions.
class EBB_API Policy : public std::enable_shared_from_this<Policy> {
 public:
  Policy() = default;
  virtual ~Policy() = default;
  Policy(const Policy&) = delete;
  Policy& operator=(const Policy&) = delete;

  // The decider for one region with this policy; shares the policy.
  virtual std::unique_ptr<Decider> activate() const = 0;

  // For reports: the rules that the user wrote.
  virtual std::vector<std::string> rulesInWords() const { return {}; }
};

}  // namespace ebb
