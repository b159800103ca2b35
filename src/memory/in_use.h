// The bytes in use: on a device, by the process, and by tensors in host memory.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>

#include "ebb/export.h"

namespace ebb {

// The accelerator that this process has begun to use, or else the CPU. Initialises no device.
EBB_API c10::Device deviceInUse();

// For an accelerator, the bytes that its allocator has handed out and cannot reuse yet, including
// bytes that wait for another stream. For the CPU, the resident bytes of the process.
EBB_API size_t bytesInUse(c10::Device device);

// For tests: if not 0, bytesInUse() returns this number.
EBB_API extern std::atomic<size_t> insteadOfBytesInUse;

// Bytes of all tensors on a device.
struct TensorBytes {
  size_t now;
  size_t most;  // since the last reset
};

// From now on, new tensors in host memory are counted. Earlier tensors are not counted.
EBB_API void countHostTensors();

// The bytes of tensors on a device; on the CPU, of counted tensors only.
EBB_API TensorBytes tensorBytes(c10::Device device);

// Resets `most`. On an accelerator, `most` is the allocator's own statistic, which the program can
// read too.
EBB_API void resetMostTensorBytes(c10::Device device);

}  // namespace ebb
