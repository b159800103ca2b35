#include "intercept/install.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "intercept/op_tables.h"
#include "intercept/op_traits.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

constinit std::atomic<CollectiveWrote> watcher{nullptr};

void watch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto wrote = watcher.load(std::memory_order_acquire);
  std::vector<at::Tensor> written;
  bool synchronous = false;
  if (!isIntercepting() && wrote != nullptr) {
    const OpTraits& traits = opTraits(op);
    const c10::IValue* arguments = stack->data() + stack->size() - traits.arguments.types.size();
    synchronous = isSynchronous(traits, arguments);
    forEachWritten(
        traits.arguments, arguments, [&](const at::Tensor& tensor) { written.push_back(tensor); });
  }
  op.redispatchBoxed(
      keys &
          c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::ADInplaceOrView),
      stack);
  for (const at::Tensor& tensor : written) {
    wrote(tensor, synchronous);
  }
}

}  // namespace

bool isSynchronous(const OpTraits& op, const c10::IValue* arguments) {
  const auto index = op.op.schema().argumentIndexWithName("async_op");
  return index && !arguments[*index].toBool();
}

void watchCollectives(CollectiveWrote wrote) { watcher.store(wrote, std::memory_order_release); }

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
