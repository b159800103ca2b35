// Kernels of accelerators that may give other bits in a second run.
#pragma once

#include <ATen/core/ivalue.h>

#include "intercept/op_traits.h"

namespace ebb {

// Note [Kernels chosen by timing]
// With torch.backends.cudnn.benchmark on, cuDNN (and MIOpen) runs several algorithms for a
// convolution the first time that a thread meets the shape. From then on the thread uses the
// fastest algorithm. A replay runs on autograd's thread, which would time the algorithms again and
// may choose another one, with other last bits. So the results of such convolutions are kept,
// unless a rule says force. cuDNN's fastest algorithms for the backward of a convolution add with
// atomics. A transposed convolution is such a backward, so its results are kept too, unless torch
// asks cuDNN for deterministic algorithms. See also Note [Kernels that do not repeat their bits].

// The reason why a replay of this call on an accelerator may give other bits than the forward; null
// if there is none. `arguments` are the call's.
const char* whyNotRepeatable(const OpTraits& op, const c10::IValue* arguments);

}  // namespace ebb
