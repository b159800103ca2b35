// Kernels for the interception key with an operator's own C++ signature.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace ebb {

// Note [Unboxed kernels]
// The boxed fallback works for every operator, and costs about as much as recording: torch makes a
// stack, copies each argument into it and moves each result back. Since torch 2.13 copying a tensor
// that only Python holds also takes the GIL. So the operators that training runs most get a kernel
// of their own signature, which at::_ops knows. It shows arguments and results to the
// interceptor as borrowed IValues, so what is recorded, and how, is the same code for both.
//
// Four more are there since boxing loses what their kernels for quantised tensors do: they put
// another tensor in the place of `out`.
//
// Nothing if `op` is not one of them: then the boxed function is right.
std::optional<c10::KernelFunction> unboxedKernel(const c10::OperatorHandle& op);

}  // namespace ebb
