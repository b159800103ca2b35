// Where an intercepted op goes. A region puts its interceptor on the thread; the boxed function in
// install.cpp calls it for every op that reaches the interception key.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/DispatchKeySet.h>

namespace ebb {

struct OpTraits;

class Interceptor {
 public:
  // Runs `op` with the arguments on `stack`, leaving its results there, through the kernels of
  // `below`. Called without the GIL, with the interception key excluded.
  virtual void call(const OpTraits& op, c10::DispatchKeySet below, torch::jit::Stack* stack) = 0;

 protected:
  ~Interceptor() = default;
};

// This thread's interceptor; null outside any region.
Interceptor* currentInterceptor();

// Puts an interceptor on the thread, or takes it off again (null). The dispatch key is included in
// the thread's set exactly while there is one.
void setCurrentInterceptor(Interceptor* interceptor);

}  // namespace ebb
