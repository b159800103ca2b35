// Collectives outside of regions, where no interceptor sees them.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace ebb {

// From now on, when the operator of a collective outside of regions returns, `wrote` is called for
// each tensor that the collective writes.
void watchCollectives(void (*wrote)(const at::Tensor&));

// The kernel that calls `wrote`, for the key ADInplaceOrView, which every call passes. Empty unless
// `op` is a collective that writes. See Note [Communication].
std::optional<c10::KernelFunction> watchingKernel(const c10::OperatorHandle& op);

}  // namespace ebb
