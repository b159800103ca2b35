// Where an intercepted op goes. A region puts its interceptor on the thread; the kernels in
// install.cpp and unboxed.cpp call it for every op that reaches the interception key.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/FunctionRef.h>

namespace ebb {

struct OpTraits;

// One intercepted call. Called without the GIL, with the interception key excluded.
struct Call {
  const OpTraits& op;
  c10::DispatchKeySet below;  // the kernels that will run
  bool repeatable;            // the kernels are those of `below`, whoever calls them
  c10::IValue* arguments;     // valid until `run`; a generator may be replaced
  // Runs the op; gives its results, valid as long as this call.
  c10::function_ref<const c10::IValue*()> run;
  // Of a boxed call: what its arguments are the top of. They may be gone when it has run, or has
  // thrown. Null: they stay, and it can be run again.
  torch::jit::Stack* stack = nullptr;
};

class Interceptor {
 public:
  // Must run the call once, or throw.
  virtual void call(Call& call) = 0;

  // An op that makes nothing new gave `result`, an alias of `tensor` with a version counter of its
  // own. Like call: without the GIL, with the interception key excluded.
  virtual void aliased(const at::Tensor& tensor, const at::Tensor& result) = 0;

 protected:
  ~Interceptor() = default;
};

// Asked for every op. See Note [Static TLS]
[[gnu::tls_model("initial-exec")]] extern constinit thread_local Interceptor* tlsInterceptor;

// Puts an interceptor on the thread, or takes it off again (null). The dispatch key is included in
// the thread's set exactly while there is one.
void setCurrentInterceptor(Interceptor* interceptor);

// The interceptor to call for an op with these keys; null if none is to see it.
inline Interceptor* interceptorFor(c10::DispatchKeySet keys) {
  // Meta tensors come from a compile that happens inside a region; they have no bytes to record.
  return keys.has_backend(c10::BackendComponent::MetaBit) ? nullptr : tlsInterceptor;
}

}  // namespace ebb
