// Policies: what becomes of each op's outputs.
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

// What happens to an op's outputs between forward and backward.
enum class Decision : uint8_t {
  Save,       // keep the bytes, if anything will need them
  Recompute,  // drop the bytes and run the op again in backward
  Offload,    // move the bytes to pinned host memory
  Page,       // move the live rows to a page pool on the device; needs markRows
  // Drop the bytes, run the op again in backward, and drop them again if it was run for others: see
  // Note [Made each time]
  RecomputeEachTime,
};

// Whether the op is run again in backward.
constexpr bool recomputes(Decision decision) {
  return decision == Decision::Recompute || decision == Decision::RecomputeEachTime;
}

// One line of a policy: it matches a result if all that it says holds.
struct Rule {
  std::string op;  // "aten::mm" (all overloads), "aten::mm.default", "aten.mm", or a glob
  Decision decision = Decision::Recompute;
  uint32_t every = 1;  // only each n-th call that all but the last four lines hold for, per region
  bool force = false;  // also for ops that are never replayed; `op` must name them exactly
  uint32_t nth = 0;    // only that call, counted as for `every`; 0: any
  bool perModule = false;                 // calls are counted per module
  std::string module{};                   // a glob over the innermost module's name; empty: any
  std::string name{};                     // only values with this name, see nameValue; empty: any
  size_t minBytes = 0;                    // the result's storage has at least so many
  size_t maxBytes = SIZE_MAX;             // the result's storage has at most so many
  std::optional<at::ScalarType> dtype{};  // of the result
};

class Policy;
using PolicyPtr = std::shared_ptr<const Policy>;

// An ordered list of rules, the first that matches an op decides, and a default. Throws
// c10::ValueError for a rule that names no registered operator, giving the nearest names. `inputs`
// is for what a region reads and another autograd function computed: Save, Offload or Page.
EBB_API PolicyPtr makePolicy(
    std::vector<Rule> rules,
    Decision fallback = Decision::Recompute,
    Decision inputs = Decision::Save);

// Does what `first` says, and what `second` says where that is Recompute.
EBB_API PolicyPtr either(const PolicyPtr& first, const PolicyPtr& second);

// Keeps nothing but leaves: the most memory saved, the most recomputed.
EBB_API PolicyPtr recomputeAll();

// Keeps everything that anything needs, as if ebb were not there.
EBB_API PolicyPtr saveAll();

// Keeps what is dear to recompute: matrix products, convolutions and attention.
EBB_API PolicyPtr saveMatmuls();

// torchtitan's selective activation checkpointing: attention and collectives kept, and every
// second matrix product.
// Source: https://github.com/pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py
EBB_API PolicyPtr torchtitan();

// Recomputes everything, and offloads what the region reads and another function computed.
EBB_API PolicyPtr offloadInputs();

// JAX's names. Products of matrices, with and without those of batches of matrices; the rest is
// recomputed. Source: https://docs.jax.dev, jax.checkpoint_policies
EBB_API PolicyPtr dotsSaveable();
EBB_API PolicyPtr dotsWithNoBatchDimsSaveable();
EBB_API PolicyPtr offloadDotWithNoBatchDims();

}  // namespace ebb
