// The dispatch key that ebb owns. Everything that names the key does so through this file.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace ebb {

// Note [The interception key]
// c10 sets CustomRNGKeyId aside for use out of tree. It sits just above the dense kernels and below
// Python, Fake, Functionalize, Conjugate/Negative, autocast and autograd, so wrapper subclasses and
// dispatch modes are resolved before an op reaches us: we see local, dense tensors. The key is in
// the thread's included set only inside a region; outside, no dispatch ever looks at it.
inline constexpr c10::DispatchKey kInterceptionKey = c10::DispatchKey::CustomRNGKeyId;

// Whether the thread is in a region, and not in the kernel of an op that we see.
inline bool isIntercepting() {
  return c10::impl::tls_is_dispatch_key_included(kInterceptionKey) &&
         !c10::impl::tls_is_dispatch_key_excluded(kInterceptionKey);
}

inline c10::DispatchKeySet keysBelowInterception(c10::DispatchKeySet keys) {
  return keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInterceptionKey);
}

// Not where torch's Python dispatcher chooses the kernels, as tracers let it.
inline bool canBeRepeated(c10::DispatchKeySet keys) {
  return !keys.has(c10::DispatchKey::PythonDispatcher);
}

// What stands between a caller and a kernel: autograd, autocast, dispatch modes, functorch and
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

// Ops in its scope are ebb's own.
inline c10::impl::ForceDispatchKeyGuard belowEverything() {
  return {c10::DispatchKeySet(c10::DispatchKey::BackendSelect), keysAboveKernels()};
}

// Whether this op was called by a __torch_dispatch__: below autograd, which counts no write there.
// Such functions run with every key above Python excluded, and nothing else excludes this one.
inline bool insidePythonDispatch() {
  return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Conjugate);
}

// Ops that kernels call are not ours to record: without this, mm would be seen four times and
// layer_norm six. Touches the thread's set directly because it runs once per op.
class ExcludeInterception {
 public:
  ExcludeInterception() : tls_(c10::impl::raw_local_dispatch_key_set), excluded_(tls_.excluded()) {
    tls_.set_excluded(excluded_ | c10::DispatchKeySet(kInterceptionKey));
  }
  ~ExcludeInterception() {
    tls_.set_excluded(excluded_);
  }
  ExcludeInterception(const ExcludeInterception&) = delete;
  ExcludeInterception& operator=(const ExcludeInterception&) = delete;

 private:
  c10::impl::PODLocalDispatchKeySet& tls_;  // this thread's set; found once
  c10::DispatchKeySet excluded_;            // what was excluded before
};

}  // namespace ebb
