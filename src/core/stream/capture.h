// Detects the capture of a CUDA graph or the like, in which device work is recorded and not run.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

#include "ebb/export.h"

namespace ebb {

// Note [Captures]
// While a graph (of CUDA, or of any device whose guard reports captures) is captured, the host may
// neither wait for the device nor query its progress. torch reports captures since 2.12; before,
// ebb asks CUDA's runtime. The runtime gives an error if another thread captures and this thread is
// on the legacy stream. Then isCapturing() returns true, since a wait on the legacy stream would
// end that capture, and the error is cleared. The functions below never throw; any other error
// shows in the next call of torch.

// True if a graph is being captured on this thread's current stream of `device`.
EBB_API bool isCapturing(c10::Device device);

// True if `stream` is part of a capture.
EBB_API bool isCapturing(c10::Stream stream);

// The number of the current capture; 0: none. Devices other than CUDA have no numbers: 1 for any
// capture.
uint64_t captureOf(c10::Device device);

// Like isCapturing(), for a CUDA stream, and by CUDA's runtime alone.
EBB_API bool isCapturingForCuda(void* stream);
// Like captureOf(), for a CUDA stream, and by CUDA's runtime alone.
EBB_API uint64_t captureForCuda(void* stream);

}  // namespace ebb
