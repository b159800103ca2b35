// How many bytes are in use: of a device, of the process, of tensors in host memory.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>

#include "ebb/export.h"

namespace ebb {

// The accelerator that this process has begun to use, else the CPU. Initialises nothing.
EBB_API c10::Device deviceInUse();

// Bytes that an accelerator's allocator has given out and cannot give out again yet, those that
// wait for another stream included; for the CPU the resident bytes of the process.
EBB_API size_t bytesInUse(c10::Device device);

// For tests: what bytesInUse() says; 0: the truth.
EBB_API extern std::atomic<size_t> insteadOfBytesInUse;

// Bytes of tensors.
struct TensorBytes {
  size_t now;
  size_t most;  // since the last reset
};

// From now on tensors in host memory are counted, those alone that are allocated from now on.
EBB_API void countHostTensors();

// On a device; for the CPU of those that are counted.
EBB_API TensorBytes tensorBytes(c10::Device device);

// From now on `most` is counted anew. On an accelerator that is the allocator's own statistic,
// which the program can read, too.
EBB_API void resetMostTensorBytes(c10::Device device);

}  // namespace ebb
