// Kernels and cuBLAS: launches are counted and logged, and do nothing.
#include <atomic>
#include <cstring>
#include <vector>

#include "dry.h"

#undef cudaLaunchKernel

namespace dry {
namespace {

std::atomic<long> launches{0};

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

// The stream of the thread's cuBLAS handle.
thread_local cudaStream_t productStream;

}  // namespace

std::unordered_map<const void*, std::string>& kernelNames() {
  static auto* made = new std::unordered_map<const void*, std::string>;
  return *made;
}

cudaError_t launch(const void* kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  ++launches;
  std::lock_guard guard(lock());
  const auto found = kernelNames().find(kernel);
  const std::string name = found != kernelNames().end() ? found->second : "?";
  const bool isProduct = name.compare(0, 6, "cublas") == 0;
  append(stream, isProduct ? settings().productMs : settings().kernelMs);
  if (FILE* log = settings().log) {
    fprintf(
        log, "K %d %p %s %u,%u,%u %u,%u,%u %zu\n", currentDevice(), static_cast<void*>(stream),
        name.c_str(), grid.x, grid.y, grid.z, block.x, block.y, block.z, shared);
  }
  return cudaSuccess;
}

namespace {

int product(const char* name, cudaStream_t stream) {
  {
    std::lock_guard guard(lock());
    kernelNames()[name] = name;
  }
  launch(name, 1, 1, 0, stream);
  return 0;
}

}  // namespace
}  // namespace dry

using namespace dry;

DRY_API long dry_cuda_launches() { return launches; }

// A line in the log that tells its reader where the program is.
DRY_API void dry_cuda_mark(const char* text) {
  std::lock_guard guard(lock());
  if (FILE* log = settings().log) {
    fprintf(log, "M %s\n", text);
    fflush(log);
  }
}

DRY_API void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}

DRY_API void __cudaRegisterFatBinaryEnd(void**) {}

DRY_API void __cudaUnregisterFatBinary(void**) {}

DRY_API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

DRY_API void __cudaRegisterFunction(
    void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard guard(lock());
  kernelNames()[host] = name;
}

DRY_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

DRY_API cudaError_t
__cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<void**>(stream) = last.stream;
  return cudaSuccess;
}

DRY_API cudaError_t cudaLaunchKernel(
    const void* kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, shared, stream);
}

DRY_API cudaError_t __cudaLaunchKernel(
    cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared, cudaStream_t stream) {
  return launch(kernel, grid, block, shared, stream);
}

DRY_API cudaError_t __cudaGetKernel(cudaKernel_t* result, const void* host) {
  *result = static_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}

DRY_API cudaError_t
cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return launch(
      kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}

DRY_API cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

DRY_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* result, const void*) {
  memset(result, 0, sizeof *result);
  result->maxThreadsPerBlock = 1024;
  result->numRegs = 32;
  result->binaryVersion = result->ptxVersion = 90;
  result->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}

DRY_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int* count, const void*, int, size_t, unsigned) {
  *count = 2;
  return cudaSuccess;
}

// ---- cuBLAS: handles, and products that succeed

DRY_API int cublasCreate_v2(void** handle) {
  *handle = new char[64];
  return 0;
}

DRY_API int cublasDestroy_v2(void* handle) {
  delete[] static_cast<char*>(handle);
  return 0;
}

DRY_API int cublasSetStream_v2(void*, void* stream) {
  productStream = static_cast<cudaStream_t>(stream);
  return 0;
}

DRY_API int cublasSetWorkspace_v2(void*, void*, size_t) { return 0; }

DRY_API int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}

DRY_API int cublasSetMathMode(void*, int) { return 0; }

DRY_API int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}

DRY_API int cublasSetPointerMode_v2(void*, int) { return 0; }

#define DRY_PRODUCT(name) \
  DRY_API int name(...) { return product(#name, productStream); }
DRY_PRODUCT(cublasSgemm_v2)
DRY_PRODUCT(cublasDgemm_v2)
DRY_PRODUCT(cublasGemmEx)
DRY_PRODUCT(cublasSgemmEx)
DRY_PRODUCT(cublasGemmStridedBatchedEx)
DRY_PRODUCT(cublasSgemmStridedBatched)
DRY_PRODUCT(cublasDgemmStridedBatched)
DRY_PRODUCT(cublasSgemmBatched)
DRY_PRODUCT(cublasSgemv_v2)
DRY_PRODUCT(cublasDgemv_v2)
DRY_PRODUCT(cublasSdot_v2)
DRY_PRODUCT(cublasDotEx)

#define DRY_OBJECT(name)                    \
  DRY_API int name##Destroy(void* object) { \
    delete[] static_cast<char*>(object);    \
    return 0;                               \
  }                                         \
  DRY_API int name##SetAttribute(void*, int, const void*, size_t) { return 0; }
DRY_OBJECT(cublasLtMatmulDesc)
DRY_OBJECT(cublasLtMatmulPreference)
DRY_OBJECT(cublasLtMatrixLayout)

DRY_API int cublasLtMatmulDescCreate(void** result, int, int) {
  *result = new char[8];
  return 0;
}

DRY_API int cublasLtMatmulPreferenceCreate(void** result) {
  *result = new char[8];
  return 0;
}

DRY_API int cublasLtMatrixLayoutCreate(void** result, int, uint64_t, uint64_t, int64_t) {
  *result = new char[8];
  return 0;
}

DRY_API int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, void* result, int* count) {
  memset(result, 0, 64);
  *count = 1;
  return 0;
}

DRY_API int cublasLtMatmul(
    void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*,
    void*, void*, void*, const void*, void*, size_t, cudaStream_t stream) {
  return product("cublasLtMatmul", stream);
}

DRY_API size_t cublasLtGetVersion() { return 130000; }
