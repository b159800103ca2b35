// Policies with a name.
#pragma once

#include <memory>

#include "ebb/export.h"
#include "region/policy.h"

namespace ebb {

// Keeps nothing but leaves: the most memory saved, the most recomputed.
EBB_API std::shared_ptr<const Policy> recomputeAll();

// Keeps everything, as if ebb were not there.
EBB_API std::shared_ptr<const Policy> saveAll();

// Keeps what is dear to recompute: matrix products, convolutions and attention.
EBB_API std::shared_ptr<const Policy> saveMatmuls();

// torchtitan's selective activation checkpointing: attention and collectives kept, and every
// second matrix product.
// Source: https://github.com/pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py
EBB_API std::shared_ptr<const Policy> torchtitan();

}  // namespace ebb
