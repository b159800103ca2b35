// What page kernels use of CUDA, for a compiler of the host: see emulator.h. What is not here does
// not compile.
#pragma once

#include <cstdint>

#include "emulator.h"

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)

#define threadIdx (emulated::here.thread)
#define blockIdx (emulated::here.block)
#define blockDim (emulated::here.threads)
#define gridDim (emulated::here.blocks)

// One access, not four: so its alignment is seen. It has no names for its parts.
using uint4 = uint32_t __attribute__((vector_size(16)));

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = emulated::sizes.processors;
  return cudaSuccess;
}

inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

inline void __syncthreads(int line = __builtin_LINE()) { emulated::synchroniseBlock(line); }

inline void __threadfence() { emulated::fence(); }

inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return emulated::increment(address, limit);
}
