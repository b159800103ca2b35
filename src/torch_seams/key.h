// The dispatch key that ebb owns. All other code names the key only through this file.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace ebb {

// Note [The interception key]
// c10 reserves CustomRNGKeyId for out-of-tree use. The key is just above the dense kernels and
// below Python, Fake, Functionalize, Conjugate/Negative, autocast and autograd. Wrapper subclasses
// and dispatch modes are therefore resolved before an op reaches ebb, which sees local, dense
// tensors. The key is in the thread's included set only inside a region; outside, no dispatch ever
// looks at the key.
inline constexpr c10::DispatchKey kInterceptionKey = c10::DispatchKey::CustomRNGKeyId;

// The thread's key sets. Guards write them, because torch's own guards cost more.
inline c10::impl::PODLocalDispatchKeySet& threadKeys() {
  return c10::impl::raw_local_dispatch_key_set;
}

// True if the thread is in a region, and not in the kernel of an intercepted op.
inline bool isIntercepting() {
  return c10::impl::tls_is_dispatch_key_included(kInterceptionKey) &&
         !c10::impl::tls_is_dispatch_key_excluded(kInterceptionKey);
}

inline c10::DispatchKeySet keysBelowInterception(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInterceptionKey);
}

// False where torch's Python dispatcher chooses the kernels, as under a tracer.
inline bool areRepeatable(c10::DispatchKeySet keys) {
  return !keys.has(c10::DispatchKey::PythonDispatcher);
}

// The keys between a caller and a kernel: autograd, autocast, dispatch modes, functorch and
// interception.
inline c10::DispatchKeySet keysAboveKernels() {
  using c10::DispatchKey;
  return c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
         c10::DispatchKeySet({
             kInterceptionKey,
             DispatchKey::Python,
             DispatchKey::PythonTLSSnapshot,
             DispatchKey::Functionalize,
             DispatchKey::FuncTorchDynamicLayerFrontMode,
             DispatchKey::FuncTorchDynamicLayerBackMode,
             DispatchKey::PreDispatch,
         });
}

// For ebb's own ops: calls in the guard's scope go directly to the kernels.
inline c10::impl::ForceDispatchKeyGuard belowEverything() {
  return {c10::DispatchKeySet(c10::DispatchKey::BackendSelect), keysAboveKernels()};
}

// True if a __torch_dispatch__ called this op. Such an op runs below autograd, where torch counts
// no writes. A __torch_dispatch__ runs with every key above Python excluded, and no other code
// excludes Conjugate.
inline bool insidePythonDispatch() {
  return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Conjugate);
}

// Excludes interception while a kernel runs: ops that kernels call are not recorded. Without this
// guard, mm would be seen four times and layer_norm six. Writes the thread's set directly, because
// the guard runs once per op.
class ExcludeInterception {
 public:
  ExcludeInterception() : tls_(threadKeys()), excluded_(tls_.excluded()) {
    tls_.set_excluded(excluded_ | c10::DispatchKeySet(kInterceptionKey));
  }
  ~ExcludeInterception() { tls_.set_excluded(excluded_); }
  ExcludeInterception(const ExcludeInterception&) = delete;
  ExcludeInterception& operator=(const ExcludeInterception&) = delete;

 private:
  c10::impl::PODLocalDispatchKeySet& tls_;  // this thread's set
  c10::DispatchKeySet excluded_;            // the excluded set before
};

}  // namespace ebb
