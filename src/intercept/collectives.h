// Collectives outside of regions, which no interceptor sees.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace ebb {

// From now on `wrote` is called for each tensor to which a collective outside of regions writes,
// when its operator returns.
void watchCollectives(void (*wrote)(const at::Tensor&));

// What calls it, for the key ADInplaceOrView, which each call passes; nothing where `op` is no
// collective that writes. See Note [Communication].
std::optional<c10::KernelFunction> watchingKernel(const c10::OperatorHandle& op);

}  // namespace ebb
