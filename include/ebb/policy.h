// Policies: decisions for each op's outputs.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ebb/export.h"

namespace ebb {

// The decision for an op's outputs: where they are between forward and backward.
enum class Decision : uint8_t {
  Save,       // keep the bytes, if backward or a recipe needs them
  Recompute,  // drop the bytes and run the op again in backward
  Offload,    // move the bytes to pinned host memory
  Page,       // move the valid rows to a page pool on the device; needs markRows
  // Like Recompute, but if a replay needs the bytes only to compute other values, ebb drops the
  // bytes again: see Note [Made each time]
  RecomputeEachTime,
};
constexpr size_t kDecisions = 5;

// True if backward runs the op again.
constexpr bool recomputes(Decision decision) {
  return decision == Decision::Recompute || decision == Decision::RecomputeEachTime;
}

// True if a plug-in takes the bytes.
constexpr bool isStored(Decision decision) {
  return decision == Decision::Offload || decision == Decision::Page;
}

// One line of a policy. A rule matches a result if all its conditions hold.
struct Rule {
  std::string op;  // "aten::mm" (all overloads), "aten::mm.default", "aten.mm", or a glob
  Decision decision = Decision::Recompute;
  uint32_t every = 1;          // only each n-th call that `op` and `module` match, per region
  bool force = false;          // also for ops that are never replayed; `op` must name them exactly
  uint32_t nth = 0;            // only the n-th call, counted as for `every`; 0: any call
  bool perModule = false;      // count calls per module
  std::string module{};        // a glob over the innermost module's name; empty: any
  std::string name{};          // only values with this name, see nameValue; empty: any
  size_t minBytes = 0;         // least size of the result's storage
  size_t maxBytes = SIZE_MAX;  // greatest size of the result's storage
  std::optional<at::ScalarType> dtype{};  // of the result
  bool preset = false;  // of a named policy; reports do not list it if it decides on nothing
};

class Policy;
using PolicyPtr = std::shared_ptr<const Policy>;

// An ordered list of rules and a default; the first matching rule decides. `inputs` is the decision
// (Save, Offload or Page) for inputs of a region that an autograd function outside the region has
// computed. Throws c10::ValueError for a rule that names no registered operator, and suggests the
// nearest names.
EBB_API PolicyPtr makePolicy(
    std::vector<Rule> rules, Decision fallback = Decision::Recompute,
    Decision inputs = Decision::Save);

// Keeps only leaves: least memory, most recomputation.
EBB_API PolicyPtr recomputeAll();

// Keeps every value that backward needs, as eager does.
EBB_API PolicyPtr saveAll();

// Keeps results that are expensive to recompute: matrix products, convolutions and attention.
EBB_API PolicyPtr saveMatmuls();

// torchtitan's selective activation checkpointing: keeps attention, collectives and every second
// matrix product.
// Source: https://github.com/pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py
EBB_API PolicyPtr torchtitan();

// Recomputes everything, and offloads inputs that an autograd function outside the region computed.
EBB_API PolicyPtr offloadInputs();

// As recomputeAll(), but also recomputes the results of the collectives that replays can repeat.
// All ranks must run the same regions.
EBB_API PolicyPtr recomputeCollectives();

// Policies under JAX's names: save all matrix products, or only those without batch dimensions. All
// else is recomputed. Source: https://docs.jax.dev, jax.checkpoint_policies
EBB_API PolicyPtr dotsSaveable();
EBB_API PolicyPtr dotsWithNoBatchDimsSaveable();

}  // namespace ebb
