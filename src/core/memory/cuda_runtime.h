// CUDA's runtime, if this process has loaded it. ebb is built without CUDA, and finds CUDA's
// functions by name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ebb {

// The address of the function `symbol`; null if there is none. Searches the global symbols, then
// the first loaded library whose file name begins with `library`: symbols of torch's dependencies
// are usually not global, and the file names may contain a hash, as in the archives of libtorch.
void* findLoaded(std::string_view library, const char* symbol);

template <class Function>
Function loadedFunction(std::string_view library, const char* symbol) {
  return reinterpret_cast<Function>(findLoaded(library, symbol));
}

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

  int (*exchangeCaptureMode)(int*) = nullptr;  // cudaThreadExchangeStreamCaptureMode

  // Clears the error of a failed call: torch would report it as an error of its next kernel.
  void forgetError() const {
    if (lastError != nullptr) {
      lastError();
    }
  }
};

const CudaRuntime& cudaRuntime();

// Note [Captures of other threads]
// While a thread captures a CUDA graph in the default mode, calls that might disturb the capture
// fail on all threads and end the capture: queries of an event, waits for an event, registering
// memory. ebb makes such calls for memory and events that are in no capture, which is harmless. So
// this thread's mode is "relaxed" during these calls, as during those of torch's allocators. Does
// nothing if there is no CUDA runtime.
class RelaxedCaptures {
 public:
  RelaxedCaptures() { exchange(); }
  ~RelaxedCaptures() { exchange(); }
  RelaxedCaptures(const RelaxedCaptures&) = delete;
  RelaxedCaptures& operator=(const RelaxedCaptures&) = delete;

 private:
  void exchange() {
    if (cudaRuntime().exchangeCaptureMode != nullptr) {
      cudaRuntime().exchangeCaptureMode(&mode_);
    }
  }

  int mode_ = 2;  // cudaStreamCaptureModeRelaxed; then the thread's mode before
};

}  // namespace ebb
