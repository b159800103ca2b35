// Stacks are made by makecontext; from then on _setjmp and _longjmp switch, which make no system
// calls.
#include "fibers.h"

#include <ucontext.h>

namespace emulated {

Fiber* Fiber::starting_ = nullptr;

Fiber::Fiber(void (*function)()) : function_(function), stack_(new char[kStackBytes]) {}

void Fiber::resume() {
  if (_setjmp(outside_) != 0) {
    return;  // it gave way
  }
  if (!started_) {
    begin();
  }
  _longjmp(inside_, 1);
}

void Fiber::giveWay() {
  if (_setjmp(inside_) == 0) {
    _longjmp(outside_, 1);
  }
}

void Fiber::begin() {
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack_.get();
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, &Fiber::run, 0);
  started_ = true;
  starting_ = this;
  setcontext(&context);
}

void Fiber::run() {
  Fiber& fiber = *starting_;
  for (;;) {
    fiber.function_();
    fiber.giveWay();
  }
}

bool Fiber::owns(const void* address) const {
  const auto* at = static_cast<const char*>(address);
  return at >= stack_.get() && at < stack_.get() + kStackBytes;
}

}  // namespace emulated
