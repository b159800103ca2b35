#include "intercept/install.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "intercept/interceptor.h"
#include "intercept/op_traits.h"
#include "support/leaked.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

// Shows a boxed call to the interceptor; `run` runs the call's kernel.
template <class Run>
void show(
    Interceptor& interceptor, const c10::OperatorHandle& op, c10::DispatchKeySet below,
    bool repeatable, torch::jit::Stack* stack, Run&& run) {
  const OpTraits& traits = opTraits(op);
  const size_t first = stack->size() - traits.arguments.types.size();
  auto runAndShow = [&]() -> const c10::IValue* {
    run();
    return stack->data() + first;
  };
  Call call{traits, below, repeatable, stack->data() + first, runAndShow};
  interceptor.call(call);
}

void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  ExcludeInterception guard;
  const c10::DispatchKeySet below = keysBelowInterception(keys);
  if (Interceptor* interceptor = interceptorFor(keys)) {
    show(*interceptor, op, below, areRepeatable(keys), stack, [&] {
      op.redispatchBoxed(below, stack);
    });
  } else {
    op.redispatchBoxed(below, stack);
  }
}

// Note [Kernels above our key]
// The keys of sparse, compressed, nested and MKL-DNN tensors are above ebb's key. A call with such
// an argument bypasses ebb and reaches kernels that read and write dense tensors directly. For
// example, ebb may intercept no op of `dense += sparse`, or only helper ops, and would miss the
// write to `dense`. So ebb puts a kernel of its own in front of each kernel at those keys. ebb's
// kernel reports the call as one that cannot be repeated: dense results become leaves, and written
// dense arguments become new values. Calls without such an argument never reach these kernels.
class KernelAbove final : public c10::OperatorKernel {
 public:
  explicit KernelAbove(c10::SafeKernelFunction kernel) : kernel_(std::move(kernel)) {}

  void operator()(
      const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
    Interceptor* interceptor = isIntercepting() ? interceptorFor(keys) : nullptr;
    if (interceptor == nullptr) {
      kernel_.callBoxed(op, keys, stack);
      return;
    }
    ExcludeInterception guard;
    show(*interceptor, op, keys, false, stack, [&] { kernel_.callBoxed(op, keys, stack); });
  }

 private:
  c10::SafeKernelFunction kernel_;  // the original kernel
};

std::vector<c10::BackendComponent> allBackends() {
  std::vector<c10::BackendComponent> backends;
  for (auto i = static_cast<uint8_t>(c10::BackendComponent::CPUBit);
       i <= static_cast<uint8_t>(c10::BackendComponent::EndOfBackendKeys); ++i) {
    backends.push_back(static_cast<c10::BackendComponent>(i));
  }
  return backends;
}

std::vector<c10::DispatchKey> keysOfKernelsAbove(
    const std::vector<c10::BackendComponent>& backends) {
  using c10::DispatchKey;
  std::vector<DispatchKey> keys;
  for (const auto kind : {DispatchKey::Sparse, DispatchKey::SparseCsr, DispatchKey::NestedTensor}) {
    for (const c10::BackendComponent backend : backends) {
      keys.push_back(c10::toRuntimePerBackendFunctionalityKey(kind, backend));
      if (backend == c10::BackendComponent::CPUBit && kind == DispatchKey::Sparse) {
        keys.push_back(DispatchKey::MkldnnCPU);
      }
    }
  }
  return keys;
}

c10::KernelFunction interceptKernel() {
  return c10::KernelFunction::makeFromBoxedFunction<&intercept>();
}

bool hasDeviceKernel(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  constexpr DispatchKey kDevices[] = {DispatchKey::CPU, DispatchKey::CUDA,       DispatchKey::HIP,
                                      DispatchKey::XPU, DispatchKey::MPS,        DispatchKey::MTIA,
                                      DispatchKey::HPU, DispatchKey::PrivateUse1};
  return std::ranges::any_of(
      kDevices, [&](DispatchKey key) { return op.hasKernelForDispatchKey(key); });
}

// Note [Operators with a kernel of their own for our key]
// 1. c10 counts CustomRNGKeyId as a backend, so a CompositeExplicitAutograd kernel outranks the
//    fallback. Operators with such a kernel get the boxed function registered directly.
// 2. Views, and ops that neither return nor write tensors, need no recipe. They fall through, so
//    they cost the same as outside a region.
// 3. CompositeImplicitAutograd operators get no kernel: they decompose above ebb's key, and a
//    kernel here would make AutogradOther ambiguous. The exception is an operator with an
//    additional device kernel (mish_backward on the CPU, _fused_rms_norm on CUDA): in a region the
//    decomposition would outrank that kernel.
// 4. Operators of other libraries always get the boxed function: a CompositeExplicitAutograd kernel
//    may be registered later.
std::optional<c10::KernelFunction> ownKernel(const c10::OperatorHandle& op) {
  using c10::DispatchKey;
  const bool decomposes = op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd);
  if (op.hasKernelForDispatchKey(kInterceptionKey) || (decomposes && !hasDeviceKernel(op))) {
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
      decomposes || !isTorchsOwn(op.operator_name().name)) {
    return interceptKernel();
  }
  return std::nullopt;
}

class Installation final {
 public:
  static Installation& get() { return leaked<Installation>(); }

  void update() {
    const bool newBackend =
        !knowsBackend_.load(std::memory_order_relaxed) && c10::is_privateuse1_backend_registered();
    if (!operatorsAreNew.load(std::memory_order_acquire) && !newBackend) {
      return;
    }
    std::lock_guard<std::mutex> lock(installMutex_);
    if (!fallback_) {
      installFallback();
    }
    coverNewOperators();
    if (newBackend) {
      coverKernelsOfBackend();
      knowsBackend_.store(true, std::memory_order_relaxed);
    }
  }

  // `registered`: false: the operator was removed.
  void noteChange(const c10::OperatorHandle& op, bool registered) {
    std::lock_guard<std::mutex> lock(pendingMutex_);
    pending_.push_back({op.operator_name(), registered});
    operatorsAreNew.store(true, std::memory_order_release);
  }

 private:
  struct Change {
    c10::OperatorName name;  // the operator whose registration changed
    bool registered;         // false: the operator was removed
  };

  struct Listener final : c10::OpRegistrationListener {
    void onOperatorRegistered(const c10::OperatorHandle& op) override {
      Installation::get().noteChange(op, true);
    }
    void onOperatorDeregistered(const c10::OperatorHandle& op) override {
      forgetOpTraits(op);
      Installation::get().noteChange(op, false);
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
    // The listener is called for every operator that exists already, so this also fills pending_.
    listener_.emplace(dispatcher.addRegistrationListener(std::make_unique<Listener>()));
  }

  void coverNewOperators() {
    c10::WarningUtils::WarningHandlerGuard quiet(&ignored_);  // replacing a kernel warns
    std::vector<Change> changes;
    {
      std::lock_guard<std::mutex> lock(pendingMutex_);
      changes.swap(pending_);
      operatorsAreNew.store(false, std::memory_order_release);
    }
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const Change& change : changes) {
      if (!change.registered) {
        kernels_.erase(change.name);
        continue;
      }
      const auto op = dispatcher.findOp(change.name);
      if (op && op->hasSchema()) {
        cover(*op, keysAbove_);
      }
    }
  }

  // `keys`: the keys of kernels above ebb's key.
  void cover(const c10::OperatorHandle& op, const std::vector<c10::DispatchKey>& keys) {
    const auto add = [&](c10::DispatchKey key, c10::KernelFunction kernel) {
      kernels_[op.operator_name()].push_back(
          c10::Dispatcher::singleton().registerImpl(
              op.operator_name(), key, std::move(kernel), std::nullopt, nullptr, "ebb"));
    };
    if (auto kernel = ownKernel(op)) {
      add(kInterceptionKey, *std::move(kernel));
    }
    if (auto kernel = watchingKernel(op)) {
      add(c10::DispatchKey::ADInplaceOrView, *std::move(kernel));
    }
    for (const c10::DispatchKey key : keys) {
      if (!passesThrough(op) && op.hasKernelForDispatchKey(key) &&
          !op.isKernelFallthroughKernel(key)) {
        add(key, c10::KernelFunction::makeFromBoxedFunctor(
                     std::make_unique<KernelAbove>(op.getComputedKernelForDispatchKey(key))));
      }
    }
  }

  // An out-of-tree backend may be registered at any time. The backend brings kernels for operators
  // that were covered before: some operators that decompose need a kernel of ebb's from now on, and
  // some have kernels above ebb's key.
  void coverKernelsOfBackend() {
    c10::WarningUtils::WarningHandlerGuard quiet(&ignored_);
    const auto keys = keysOfKernelsAbove({c10::BackendComponent::PrivateUse1Bit});
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findOp(name);
      if (op && op->hasSchema()) {
        cover(*op, keys);
      }
    }
  }

  struct Ignored final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };

  Ignored ignored_;
  std::mutex installMutex_;                // one installer at a time
  std::mutex pendingMutex_;                // guards pending_; taken under the dispatcher's own lock
  std::atomic<bool> knowsBackend_{false};  // coverKernelsOfBackend() has run
  std::vector<Change> pending_;            // added by the listener, handled by the next update()
  std::optional<c10::RegistrationHandleRAII> fallback_;  // ebb's fallback for the key
  std::optional<c10::RegistrationHandleRAII> listener_;  // keeps the listener registered
  const std::vector<c10::DispatchKey> keysAbove_ = keysOfKernelsAbove(allBackends());
  // See Note [Operators with a kernel of their own for our key] and Note [Kernels above our key]
  std::unordered_map<c10::OperatorName, std::vector<c10::RegistrationHandleRAII>> kernels_;
};

}  // namespace

// Until interception is installed, all operators are new.
constinit std::atomic<bool> operatorsAreNew{true};

constinit thread_local Interceptor* tlsInterceptor = nullptr;

void setCurrentInterceptor(Interceptor* interceptor) {
  tlsInterceptor = interceptor;
  c10::impl::tls_set_dispatch_key_included(kInterceptionKey, interceptor != nullptr);
}

void installInterception() { Installation::get().update(); }

}  // namespace ebb
