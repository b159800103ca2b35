// Whether what runs now is only written down, as a graph of the device's.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

#include "ebb/export.h"

namespace ebb {

// Note [Captures]
// While a graph (of CUDA, or of any device whose guard tells) is captured, the host may not wait
// for the device, nor ask how far it is. torch tells since 2.12; before, CUDA's runtime is asked.
// It refuses to say where another thread captures and this one is on the legacy stream: then the
// answer is yes, since whoever waits there would end that capture. What it leaves behind is
// forgotten. These functions never throw: whatever else is wrong, the next call of torch's says so.

// Whether a graph is being captured on this thread's stream of `device`.
EBB_API bool isCapturing(c10::Device device);

// Whether `stream` is a part of one.
EBB_API bool isCapturing(c10::Stream stream);

// Which capture that is: none has 0. Where only torch tells, and not which, all have 1.
uint64_t captureOf(c10::Device device);

// The same, of a stream of CUDA's and by its runtime alone.
EBB_API bool isCapturingForCuda(void* stream);
EBB_API uint64_t captureForCuda(void* stream);

}  // namespace ebb
