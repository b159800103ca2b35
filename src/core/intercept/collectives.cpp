#include <c10/util/Synchronized.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "intercept/in_transit.h"
#include "intercept/install.h"
#include "intercept/interceptor.h"
#include "intercept/op_tables.h"
#include "support/leaked.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct InTransit {
  // A weak reference prevents reuse of the key's address.
  ska::flat_hash_map<const c10::StorageImpl*, WeakStorage> storages;
  size_t sweepAt = 64;  // size at which freed storages are removed
};

c10::Synchronized<InTransit>& inTransit() { return leaked<c10::Synchronized<InTransit>>(); }

// Null for a tensor without bytes.
c10::StorageImpl* storageIn(const at::Tensor& tensor) {
  const bool has = tensor.defined() && tensor.unsafeGetTensorImpl()->has_storage();
  return has ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

constinit std::atomic<CollectiveWrote> watcher{nullptr};

bool isWait(const OpTraits& traits) {
  return traits.op.schema().name() == "_c10d_functional::wait_tensor";
}

// Runs a collective outside of regions. In a region the interceptor sees the call.
void runOutside(const OpTraits& traits, torch::jit::Stack* stack, const auto& run) {
  const c10::IValue* arguments = stack->data() + stack->size() - traits.arguments.types.size();
  const bool returnsEarly = !isSynchronous(traits, arguments);
  std::vector<at::Tensor> written;
  forEachWritten(traits.arguments, arguments, [&](const at::Tensor& tensor) {
    written.push_back(tensor);
    if (returnsEarly) {
      noteInTransit(tensor);
    }
  });
  run();
  if (const auto wrote = watcher.load(std::memory_order_acquire)) {
    std::ranges::for_each(written, wrote);
  }
  if (written.empty() && !isWait(traits)) {
    forEachTensor(
        stack->data() + stack->size() - traits.results.size(), traits.results,
        [](const at::Tensor& tensor, size_t, int32_t) { noteInTransit(tensor); });
  }
}

// The kernel of watchingKernel().
void watch(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const OpTraits& traits = opTraits(op);
  const auto run = [&] {
    op.redispatchBoxed(
        keys &
            c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::ADInplaceOrView),
        stack);
  };
  if (isIntercepting()) {
    run();
  } else {
    runOutside(traits, stack, run);
  }
  if (isWait(traits)) {
    hasArrived(stack->back().toTensor());
  }
}

}  // namespace

bool isSynchronous(const OpTraits& op, const c10::IValue* arguments) {
  const auto index = op.op.schema().argumentIndexWithName("async_op");
  return index && !arguments[*index].toBool();
}

void noteInTransit(const at::Tensor& tensor) {
  c10::StorageImpl* storage = storageIn(tensor);
  if (storage == nullptr) {
    return;
  }
  inTransit().withLock([&](InTransit& all) {
    if (all.storages.size() >= all.sweepAt) {
      for (auto entry = all.storages.begin(); entry != all.storages.end();) {
        entry = entry->second.expired() ? all.storages.erase(entry) : std::next(entry);
      }
      all.sweepAt = 2 * all.storages.size() + 64;
    }
    all.storages.insert_or_assign(storage, WeakStorage::reclaim_copy(storage));
  });
}

void hasArrived(const at::Tensor& tensor) {
  inTransit().withLock([&](InTransit& all) { all.storages.erase(storageIn(tensor)); });
}

bool isInTransit(const c10::Storage& storage) {
  return inTransit().withLock(
      [&](const InTransit& all) { return all.storages.count(storage.unsafeGetStorageImpl()) > 0; });
}

void watchCollectives(CollectiveWrote wrote) { watcher.store(wrote, std::memory_order_release); }

std::optional<c10::KernelFunction> watchingKernel(const c10::OperatorHandle& op) {
  if (!communicates(op.operator_name().name) ||
      op.hasKernelForDispatchKey(c10::DispatchKey::ADInplaceOrView)) {
    return std::nullopt;
  }
  return c10::KernelFunction::makeFromBoxedFunction<&watch>();
}

}  // namespace ebb
