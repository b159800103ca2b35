#include "intercept/install.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "intercept/each_tensor.h"
#include "intercept/op_tables.h"
#include "intercept/op_traits.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

constinit std::atomic<void (*)(const at::Tensor&)> watcher{nullptr};

void watch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto wrote = watcher.load(std::memory_order_acquire);
  std::vector<at::Tensor> written;
  if (!isIntercepting() && wrote != nullptr) {
    const ArgumentTraits& traits = opTraits(op).arguments;
    forEachWritten(
        traits, stack->data() + stack->size() - traits.types.size(),
        [&](const auto& tensor) { written.push_back(tensor); });
  }
  op.redispatchBoxed(
      keys &
          c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::ADInplaceOrView),
      stack);
  for (const at::Tensor& tensor : written) {
    wrote(tensor);
  }
}

}  // namespace

void watchCollectives(void (*wrote)(const at::Tensor&)) {
  watcher.store(wrote, std::memory_order_release);
}

std::optional<c10::KernelFunction> watchingKernel(const c10::OperatorHandle& op) {
  if (!communicates(op.operator_name().name) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) {
    return std::nullopt;
  }
  const auto& uses = opTraits(op).arguments.uses;
  if (std::ranges::none_of(uses, isWritten)) {
    return std::nullopt;
  }
  return c10::KernelFunction::makeFromBoxedFunction<&watch>();
}

}  // namespace ebb
