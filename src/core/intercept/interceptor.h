// The receiver of intercepted ops. A region sets the thread's interceptor; the kernels in
// install.cpp and unboxed.cpp call the interceptor for every op that reaches the interception key.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/FunctionRef.h>

namespace ebb {

struct OpTraits;

// One intercepted call. The GIL is released, and the interception key is excluded.
struct Call {
  const OpTraits& op;
  c10::DispatchKeySet below;  // the keys of the kernels that will run
  bool repeatable;            // a call with the keys `below` runs the same kernels
  c10::IValue* arguments;     // valid until `run`; the interceptor may replace a generator
  // Runs the op; returns the results, which are valid as long as this call.
  c10::function_ref<const c10::IValue*()> run;
};

class Interceptor {
 public:
  Interceptor(const Interceptor&) = delete;
  Interceptor& operator=(const Interceptor&) = delete;

  // Must run the call once, or throw.
  virtual void call(Call& call) = 0;

  // Called after an op that computes nothing, such as detach(), has returned `result`, an alias of
  // `tensor` with a version counter of its own. As for call(), the GIL is released and the
  // interception key is excluded.
  virtual void aliased(const at::Tensor& tensor, const at::Tensor& result) = 0;

  // The interceptor that records the calls: this one, or the one to which this one forwards.
  virtual Interceptor& recorder() { return *this; }

 protected:
  Interceptor() = default;
  ~Interceptor() = default;
};

// Read for every op. See Note [Static TLS]
[[gnu::tls_model("initial-exec")]] extern constinit thread_local Interceptor* tlsInterceptor;

// Sets the thread's interceptor; null removes it. The thread includes the dispatch key exactly
// while an interceptor is set.
void setCurrentInterceptor(Interceptor* interceptor);

// The interceptor to call for an op with these keys; null if the op is not intercepted.
inline Interceptor* interceptorFor(c10::DispatchKeySet keys) {
  // Meta tensors come from a compilation inside a region, and have no bytes to record.
  return keys.has_backend(c10::BackendComponent::MetaBit) ? nullptr : tlsInterceptor;
}

}  // namespace ebb
