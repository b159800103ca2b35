// CUDA's runtime, if this process has loaded it. ebb is built without CUDA, and looks functions up
// by name.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ebb {

// Functions are null if there is no runtime, and return 0 on success.
struct CudaRuntime {
  int (*add)(void*, size_t, unsigned) = nullptr;  // cudaHostRegister
  int (*drop)(void*) = nullptr;                   // cudaHostUnregister
  int (*lastError)() = nullptr;                   // cudaGetLastError
  int (*busId)(char*, int, int) = nullptr;        // cudaDeviceGetPCIBusId
  int (*capturing)(void*, int*) = nullptr;        // cudaStreamIsCapturing
  // cudaStreamGetCaptureInfo. CUDA versions differ in the output pointers after the first two.
  // These pointers may be null; a version with fewer parameters ignores the rest.
  int (*captureInfo)(void*, int*, uint64_t*, void*, void*, void*, void*) = nullptr;

  // Clears the error of a failed call: torch would report it as an error of its next kernel.
  void forgetError() const {
    if (lastError != nullptr) {
      lastError();
    }
  }
};

const CudaRuntime& cudaRuntime();

}  // namespace ebb
