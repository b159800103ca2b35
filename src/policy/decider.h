// Who says what happens to an op's outputs.
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
  bool forced = false;      // a rule that names the op exactly overrides Note [Never replayed]
  bool named = false;       // a rule matched; it was not the default that decided
  uint16_t rule = kNoRule;  // its place in the policy
  uint64_t perResult = 0;   // not 0: it depends on each result, so `decideOn` is to be asked
};

// Implemented by the region's policy. Called once per recorded op, so it must not allocate.
class Decider {
 public:
  virtual ~Decider() = default;

  virtual Verdict decide(const OpTraits& op) = 0;

  // For one result of an op on whose call the verdict was `call`.
  virtual Verdict decideOn(const OpTraits& op, const at::Tensor& result, const Verdict& call) = 0;

  // For a result of an op that has been given a name; `rule` decided on it before. Nothing if that
  // rule comes first.
  virtual std::optional<Verdict> decideOnNamed(
      const OpTraits& op, const at::Tensor& result, uint16_t rule, const std::string& name) = 0;

  // For reports: what decided, in words, and the module that runs.
  virtual std::string ruleInWords(uint16_t rule) const = 0;
  virtual const std::string& module() const = 0;

  // What happens to values that the region reads and another autograd function computed.
  virtual Decision inputs() const = 0;
};

}  // namespace ebb
