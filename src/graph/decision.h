// What to do with an op's outputs, and who says so.
#pragma once

#include <cstdint>

namespace ebb {

struct OpTraits;

enum class Decision : uint8_t { Save, Recompute, Offload, Page };

struct Verdict {
  Decision decision = Decision::Recompute;
  bool forced = false;  // a rule that names the op exactly overrides Note [Never replayed]
};

// Implemented by the region's policy. Called once per recorded op, so it must not allocate.
class Decider {
 public:
  virtual Verdict decide(const OpTraits& op) = 0;

 protected:
  ~Decider() = default;
};

}  // namespace ebb
