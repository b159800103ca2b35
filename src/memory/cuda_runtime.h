// CUDA's runtime, where this process has it: ebb is built without CUDA, and finds it by its names.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ebb {

// Null where there is none. Each gives 0 if it did what it is for.
struct CudaRuntime {
  int (*add)(void*, size_t, unsigned) = nullptr;  // cudaHostRegister
  int (*drop)(void*) = nullptr;                   // cudaHostUnregister
  int (*lastError)() = nullptr;                   // cudaGetLastError
  int (*busId)(char*, int, int) = nullptr;        // cudaDeviceGetPCIBusId
  int (*capturing)(void*, int*) = nullptr;        // cudaStreamIsCapturing
  // cudaStreamGetCaptureInfo, of which the versions of CUDA have several with more and more results
  // behind the first two. All of those may be null, and are not looked at where there are none.
  int (*captureInfo)(void*, int*, uint64_t*, void*, void*, void*, void*) = nullptr;

  // Nothing must be left behind by a call that failed: torch would take it for an error of its next
  // kernel.
  void forgetError() const {
    if (lastError != nullptr) {
      lastError();
    }
  }
};

const CudaRuntime& cudaRuntime();

}  // namespace ebb
