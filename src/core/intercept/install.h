// The kernels that ebb registers.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <optional>

#include "ebb/export.h"

namespace ebb {

// The first call installs interception. Later calls cover operators that libraries have registered
// since. Called when Python imports ebb and at every region entry. Throws if another library owns
// the dispatch key.
EBB_API void installInterception();

// True if a library has registered operators since the last installInterception(). Every op reads
// the flag, so the read is one relaxed load.
extern constinit std::atomic<bool> operatorsAreNew;

// No interceptor sees collectives outside of regions. From now on, when the operator of such a
// collective returns, `wrote` is called for each tensor that the collective writes.
using CollectiveWrote = void (*)(const at::Tensor& tensor);
void watchCollectives(CollectiveWrote wrote);

// The kernel of a collective for the key ADInplaceOrView, which every call passes. The kernel calls
// `wrote`, and notes the storages in transit. Empty for other operators. See Note [Communication].
std::optional<c10::KernelFunction> watchingKernel(const c10::OperatorHandle& op);

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
