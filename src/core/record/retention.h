// How the bytes of a packed value survive until backward.
#pragma once

#include <cstdint>

namespace ebb {

enum class Retention : uint8_t {
  Unmanaged,   // autograd's handle holds the storage, as in eager
  Saved,       // the handle holds the storage and the value: the policy saved the value
  Recomputed,  // the handle holds the value alone
  Away,        // the handle holds the value, whose bytes are elsewhere
};

struct RetentionFacts {
  bool away = false;      // the value has a stash
  bool keeps = false;     // the decision keeps the bytes
  bool byPolicy = false;  // the policy made the decision
  bool hasRecipe = false;
};

constexpr Retention retentionOf(const RetentionFacts& facts) {
  if (facts.away) {
    return Retention::Away;
  }
  if (facts.keeps && facts.byPolicy) {
    return Retention::Saved;
  }
  return facts.keeps || !facts.hasRecipe ? Retention::Unmanaged : Retention::Recomputed;
}

static_assert(retentionOf({.hasRecipe = true}) == Retention::Recomputed);
static_assert(retentionOf({.byPolicy = true, .hasRecipe = true}) == Retention::Recomputed);
static_assert(retentionOf({.keeps = true, .byPolicy = true}) == Retention::Saved);
static_assert(retentionOf({.keeps = true, .hasRecipe = true}) == Retention::Unmanaged);
static_assert(retentionOf({}) == Retention::Unmanaged, "a leaf");
static_assert(retentionOf({.byPolicy = true}) == Retention::Unmanaged, "lost its recipe");
static_assert(retentionOf({.away = true, .keeps = true, .byPolicy = true}) == Retention::Away);
static_assert(retentionOf({.away = true, .hasRecipe = true}) == Retention::Away);

// True if the storage that was packed stays resident.
constexpr bool isResident(Retention retention) {
  return retention == Retention::Unmanaged || retention == Retention::Saved;
}

}  // namespace ebb
