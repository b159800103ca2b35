#include "stream/capture.h"

#include <c10/util/Exception.h>

#include "memory/cuda_runtime.h"
#include "stream/stream.h"

namespace ebb {
namespace {

// CUDA's error numbers for captures.
bool isAboutCaptures(int error) { return error >= 900 && error <= 908; }

}  // namespace

bool isCapturing(c10::Stream stream) {
  if (stream.device_type() == c10::kCPU) {
    return false;
  }
#if EBB_TORCH_VERSION >= 21200
  try {
    return stream.is_capturing();  // torch clears the CUDA error that it raises
  } catch (const c10::AcceleratorError& error) {
    return isAboutCaptures(error.get_error_code());
  } catch (const c10::Error&) {
    return false;
  }
#else
  return stream.device_type() == c10::kCUDA && isCapturingForCuda(stream.native_handle());
#endif
}

bool isCapturing(c10::Device device) {
  try {
    return isCapturing(currentStream(device));
  } catch (const c10::Error&) {  // torch has no such device, or the machine has no GPU or driver
    return false;
  }
}

uint64_t captureOf(c10::Device device) {
  if (!isCapturing(device)) {
    return 0;
  }
  return device.is_cuda() ? captureForCuda(currentStream(device).native_handle()) : 1;
}

bool isCapturingForCuda(void* stream) {
  const auto asked = cudaRuntime().capturing;
  int status = 0;
  const int error = asked != nullptr ? asked(stream, &status) : 0;
  if (error != 0) {
    cudaRuntime().forgetError();
  }
  return error == 0 ? status != 0 : isAboutCaptures(error);
}

uint64_t captureForCuda(void* stream) {
  const auto asked = cudaRuntime().captureInfo;
  int status = 0;
  uint64_t id = 0;
  void* const none = nullptr;
  if (asked != nullptr && asked(stream, &status, &id, none, none, none, none) != 0) {
    cudaRuntime().forgetError();
  }
  return id == 0 ? 1 : id;
}

}  // namespace ebb
