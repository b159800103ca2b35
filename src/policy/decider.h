// The interface of a region's policy, which decides on an op's outputs.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <optional>
#include <string>

#include "ebb/policy.h"

namespace ebb {

struct OpTraits;

struct Verdict {
  static constexpr uint16_t kNoRule = UINT16_MAX;

  Decision decision = Decision::Recompute;
  bool forced = false;      // by a rule with `force`, which overrides Note [Never replayed]
  bool named = false;       // a rule matched, not only a default
  uint16_t rule = kNoRule;  // index in the policy
  uint64_t perResult = 0;   // not 0: the decision depends on each result; call decideOn()
};

// Implemented by the region's policy. decide() runs for each recorded op and must be fast.
class Decider {
 public:
  virtual ~Decider() = default;

  virtual Verdict decide(const OpTraits& op) = 0;

  // The verdict on one result of an op. `call` is the verdict on the op's call.
  virtual Verdict decideOn(const OpTraits& op, const at::Tensor& result, const Verdict& call) = 0;

  // The verdict on a result that the program has just named; `rule` decided on the result before.
  // Empty if no rule before `rule` matches the name.
  virtual std::optional<Verdict> decideOnNamed(
      const OpTraits& op, const at::Tensor& result, uint16_t rule, const std::string& name) = 0;

  // For reports: the deciding rule in words.
  virtual std::string ruleInWords(uint16_t rule) const = 0;
  // For reports: the name of the running module.
  virtual const std::string& module() const = 0;

  // The decision for values that the region reads and that another autograd function computed.
  virtual Decision inputs() const = 0;
};

}  // namespace ebb
