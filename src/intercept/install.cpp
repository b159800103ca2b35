#include "intercept/install.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "intercept/interceptor.h"
#include "intercept/key.h"
#include "intercept/op_traits.h"
#include "intercept/unboxed.h"

namespace ebb {
namespace {

void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  ExcludeInterception guard;
  const c10::DispatchKeySet below = keysBelowInterception(keys);
  Interceptor* interceptor = interceptorFor(keys);
  if (interceptor == nullptr) {
    op.redispatchBoxed(below, stack);
    return;
  }
  const OpTraits& traits = opTraits(op);
  const size_t first = stack->size() - traits.argumentCount;
  auto run = [&]() -> const c10::IValue* {
    op.redispatchBoxed(below, stack);
    return stack->data() + first;
  };
  Call call{traits, below, stack->data() + first, run};
  interceptor->call(call);
}

c10::KernelFunction interceptKernel() {
  return c10::KernelFunction::makeFromBoxedFunction<&intercept>();
}

bool hasDeviceKernel(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  constexpr DispatchKey kDevices[] = {
      DispatchKey::CPU,
      DispatchKey::CUDA,
      DispatchKey::HIP,
      DispatchKey::XPU,
      DispatchKey::MPS,
      DispatchKey::MTIA,
      DispatchKey::HPU,
      DispatchKey::PrivateUse1};
  return std::any_of(std::begin(kDevices), std::end(kDevices), [&](DispatchKey key) {
    return op.hasKernelForDispatchKey(key);
  });
}

// Note [Operators with a kernel of their own for our key]
// 1. c10 counts CustomRNGKeyId as a backend, so a CompositeExplicitAutograd kernel outranks the
//    fallback. Those operators get the boxed function registered directly.
// 2. Views, and ops that neither return nor write tensors, need no recipe: they fall through, so
//    they cost what they cost outside a region.
// 3. CompositeImplicitAutograd operators get none: they decompose above us, and a kernel here makes
//    AutogradOther ambiguous. But where a device has a kernel of its own besides (mish_backward on
//    the CPU, _fused_rms_norm on CUDA), the decomposition would outrank it in a region.
std::optional<c10::KernelFunction> ownKernel(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  const bool decomposes = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
  if (!op.hasSchema() || op.hasKernelForDispatchKey(kInterceptionKey) ||
      (decomposes && !hasDeviceKernel(op))) {
    return std::nullopt;
  }
  if (passesThrough(op)) {
    return c10::KernelFunction::makeFallthrough();
  }
  if (auto unboxed = unboxedKernel(op)) {
    return unboxed;  // see Note [Unboxed kernels]
  }
  if (op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd) ||
      op.hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutogradNonFunctional) ||
      decomposes) {
    return interceptKernel();
  }
  return std::nullopt;
}

class Installation final {
 public:
  static Installation& get() {
    // Leaked on purpose: kernels must outlive every thread that may still dispatch at exit.
    static auto* installation = new Installation;
    return *installation;
  }

  void update() {
    if (upToDate_.load(std::memory_order_acquire)) {
      return;
    }
    std::lock_guard<std::mutex> lock(installMutex_);
    if (!fallback_) {
      installFallback();
    }
    coverNewOperators();
  }

  void onRegistered(const c10::OperatorHandle& op) {
    std::lock_guard<std::mutex> lock(pendingMutex_);
    pending_.push_back({op.operator_name(), true});
    upToDate_.store(false, std::memory_order_release);
  }

  void onDeregistered(const c10::OperatorHandle& op) {
    forgetOpTraits(op);
    std::lock_guard<std::mutex> lock(pendingMutex_);
    pending_.push_back({op.operator_name(), false});
    upToDate_.store(false, std::memory_order_release);
  }

 private:
  struct Change {
    c10::OperatorName name;  // the operator whose registration changed
    bool registered;         // false: it is gone
  };

  struct Listener final : c10::OpRegistrationListener {
    void onOperatorRegistered(const c10::OperatorHandle& op) override {
      Installation::get().onRegistered(op);
    }
    void onOperatorDeregistered(const c10::OperatorHandle& op) override {
      Installation::get().onDeregistered(op);
    }
  };

  void installFallback() {
    auto& dispatcher = c10::Dispatcher::singleton();
    try {
      fallback_.emplace(
          dispatcher.registerFallback(kInterceptionKey, interceptKernel(), "registered by ebb"));
    } catch (const c10::Error& error) {
      TORCH_CHECK(
          false,
          "ebb cannot intercept operators: the dispatch key CustomRNGKeyId already has a fallback, "
          "so another library in this process owns it. Likely causes: 1. a second copy of ebb is "
          "loaded (an old build on sys.path); 2. a library with its own random number generator "
          "key is imported. Import only one of them. torch says: ",
          error.what_without_backtrace());
    }
    // The listener is told of every operator that exists already, so this also fills pending_.
    listener_.emplace(dispatcher.addRegistrationListener(std::make_unique<Listener>()));
  }

  void coverNewOperators() {
    std::vector<Change> changes;
    {
      std::lock_guard<std::mutex> lock(pendingMutex_);
      changes.swap(pending_);
      upToDate_.store(true, std::memory_order_release);
    }
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const Change& change : changes) {
      if (!change.registered) {
        kernels_.erase(change.name);
        continue;
      }
      const auto op = dispatcher.findOp(change.name);
      const auto kernel = op ? ownKernel(*op) : std::nullopt;
      if (kernel) {
        kernels_.insert_or_assign(
            change.name,
            dispatcher.registerImpl(
                change.name, kInterceptionKey, *kernel, std::nullopt, nullptr, "ebb"));
      }
    }
  }

  std::mutex installMutex_;            // one installer at a time
  std::mutex pendingMutex_;            // guards pending_; taken under the dispatcher's own lock
  std::atomic<bool> upToDate_{false};  // nothing in pending_ and the fallback is there
  std::vector<Change> pending_;        // told by the listener, handled at the next region entry
  std::optional<c10::RegistrationHandleRAII> fallback_;  // our fallback for the key
  std::optional<c10::RegistrationHandleRAII> listener_;  // keeps the listener registered
  // See Note [Operators with a kernel of their own for our key]
  std::unordered_map<c10::OperatorName, c10::RegistrationHandleRAII> kernels_;
};

}  // namespace

constinit thread_local Interceptor* tlsInterceptor = nullptr;

void setCurrentInterceptor(Interceptor* interceptor) {
  tlsInterceptor = interceptor;
  c10::impl::tls_set_dispatch_key_included(kInterceptionKey, interceptor != nullptr);
}

void installInterception() {
  Installation::get().update();
}

}  // namespace ebb
