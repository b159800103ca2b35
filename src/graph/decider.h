// Who says what happens to an op's outputs.
#pragma once

#include "ebb/ebb.h"

namespace ebb {

struct OpTraits;

struct Verdict {
  Decision decision = Decision::Recompute;
  bool forced = false;  // a rule that names the op exactly overrides Note [Never replayed]
  bool named = false;   // a rule matched; it was not the default that decided
};

// Implemented by the region's policy. Called once per recorded op, so it must not allocate.
class Decider {
 public:
  virtual Verdict decide(const OpTraits& op) = 0;

  // What happens to values that the region reads and another autograd function computed.
  virtual Decision inputs() const = 0;

 protected:
  ~Decider() = default;
};

}  // namespace ebb
