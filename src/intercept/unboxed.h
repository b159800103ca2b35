// Kernels for the interception key with an operator's own C++ signature.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace ebb {

// Note [Unboxed kernels]
// The boxed fallback works for every operator, but costs about as much as recording: torch makes a
// stack, copies each argument to the stack and moves each result back. Since torch 2.13, copying a
// tensor that only Python holds also takes the GIL. So the operators that training runs most get a
// kernel with the operator's own signature, as at::_ops knows it. The kernel shows arguments and
// results to the interceptor as borrowed IValues, so both kinds of kernel share the code that
// records.
//
// Four more operators are listed because of their kernels for quantised tensors: such a kernel
// assigns another tensor to `out`, and boxing loses this assignment.
//
// Returns nothing for all other operators, which use the boxed function.
std::optional<c10::KernelFunction> unboxedKernel(const c10::OperatorHandle& op);

}  // namespace ebb
