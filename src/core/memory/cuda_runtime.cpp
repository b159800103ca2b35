#include "memory/cuda_runtime.h"

#include <type_traits>

#include "memory/loaded_library.h"

namespace ebb {
namespace {

CudaRuntime findRuntime() {
  CudaRuntime found;
  const auto find = [&](auto& function, const char* name) {
    function = loadedFunction<std::decay_t<decltype(function)>>("libcudart", name);
  };
  find(found.add, "cudaHostRegister");
  find(found.drop, "cudaHostUnregister");
  find(found.lastError, "cudaGetLastError");
  find(found.busId, "cudaDeviceGetPCIBusId");
  find(found.capturing, "cudaStreamIsCapturing");
  find(found.captureInfo, "cudaStreamGetCaptureInfo");
  find(found.exchangeCaptureMode, "cudaThreadExchangeStreamCaptureMode");
  return found;
}

}  // namespace

const CudaRuntime& cudaRuntime() {
  static const CudaRuntime functions = findRuntime();
  return functions;
}

}  // namespace ebb
