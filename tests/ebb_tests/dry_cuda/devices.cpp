// Devices, their properties, and errors.
#include <time.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "dry.h"

namespace dry {
namespace {

double number(const char* name, double otherwise) {
  const char* value = getenv(name);
  return value != nullptr ? atof(value) : otherwise;
}

Settings read() {
  Settings made;
  made.devices = static_cast<int>(number("DRY_CUDA_DEVICES", 1));
  made.memory = static_cast<size_t>(number("DRY_CUDA_MEMORY", 8.0 * (size_t{1} << 30)));
  made.kernelMs = number("DRY_CUDA_KERNEL_US", 0) / 1e3;
  made.productMs = number("DRY_CUDA_GEMM_US", number("DRY_CUDA_KERNEL_US", 0)) / 1e3;
  const double speed = number("DRY_CUDA_GBPS", 0);
  made.msPerByte = speed > 0 ? 1 / (speed * 1e6) : 0;
  const char* log = getenv("DRY_CUDA_LOG");
  made.log = log != nullptr ? fopen(log, "w") : nullptr;
  return made;
}

thread_local int device = 0;
thread_local cudaError_t lastError = cudaSuccess;

}  // namespace

const Settings& settings() {
  static const Settings read_ = read();
  return read_;
}

std::mutex& lock() {
  static auto* made = new std::mutex;
  return *made;
}

int& currentDevice() { return device; }

cudaError_t failed(cudaError_t error) {
  lastError = error;
  return error;
}

double now() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(since).count();
}

void sleepUntil(double at) {
  const double ms = at - now();
  if (ms > 0) {
    const timespec duration{time_t(ms / 1e3), long(std::fmod(ms, 1e3) * 1e6)};
    nanosleep(&duration, nullptr);
  }
}

}  // namespace dry

using namespace dry;

DRY_API cudaError_t cudaGetDeviceCount(int* count) {
  *count = settings().devices;
  return cudaSuccess;
}

DRY_API cudaError_t cudaGetDevice(int* found) {
  *found = currentDevice();
  return cudaSuccess;
}

DRY_API cudaError_t cudaSetDevice(int chosen) {
  if (chosen < 0 || chosen >= settings().devices) {
    return failed(cudaErrorInvalidDevice);
  }
  currentDevice() = chosen;
  return cudaSuccess;
}

DRY_API cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

DRY_API cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

DRY_API cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

DRY_API cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

DRY_API cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int of) {
  snprintf(id, length, "0000:%02x:00.0", of + 1);
  return cudaSuccess;
}

DRY_API cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least != nullptr) {
    *least = 0;
  }
  if (greatest != nullptr) {
    *greatest = -5;
  }
  return cudaSuccess;
}

// An H100's limits.
DRY_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int of) {
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "Dry CUDA");
  p->major = 9;
  p->totalGlobalMem = settings().memory;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->maxBlocksPerMultiProcessor = 32;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 50 << 20;
  p->memoryBusWidth = 5120;
  p->textureAlignment = 512;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->unifiedAddressing = p->concurrentKernels = p->cooperativeLaunch = 1;
  p->asyncEngineCount = 3;
  p->pciBusID = of + 1;
  return cudaSuccess;
}

DRY_API cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int of) {
  cudaDeviceProp p;
  cudaGetDeviceProperties(&p, of);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case cudaDevAttrWarpSize:
      *value = p.warpSize;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = p.multiProcessorCount;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(p.sharedMemPerBlock);
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(p.sharedMemPerBlockOptin);
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = p.major;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = p.minor;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = p.maxGridSize[0];
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = p.maxGridSize[1];
      break;
    default:
      *value = 1;
  }
  return cudaSuccess;
}

DRY_API cudaError_t cudaGetLastError() { return std::exchange(lastError, cudaSuccess); }

DRY_API cudaError_t cudaPeekAtLastError() { return lastError; }

DRY_API const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    default:
      return "error of the dry CUDA runtime";
  }
}

DRY_API const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorOther";
}

DRY_API cudaError_t cudaProfilerStart() { return cudaSuccess; }

DRY_API cudaError_t cudaProfilerStop() { return cudaSuccess; }

// torch asks for driver functions by name; none is there.
DRY_API cudaError_t cudaGetDriverEntryPointByVersion(
    const char*, void** function, unsigned, unsigned long long,
    cudaDriverEntryPointQueryResult* result) {
  static const auto notSupported = +[] { return 801; };
  *function = reinterpret_cast<void*>(notSupported);
  if (result != nullptr) {
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}
