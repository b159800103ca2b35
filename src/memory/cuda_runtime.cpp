#include "memory/cuda_runtime.h"

#include <dlfcn.h>
#include <link.h>

#include <string>
#include <string_view>
#include <type_traits>

namespace ebb {
namespace {

// Returns a handle of CUDA's runtime if the library is loaded; else null. Searches the loaded
// libraries by name, since symbols of torch's dependencies are usually not global. The name may
// contain a hash, as in the archives of libtorch: libcudart-d0da41ae.so.13.
void* loadedRuntime() {
  std::string name;
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* found) {
        const std::string_view path = library->dlpi_name;
        if (!path.substr(path.rfind('/') + 1).starts_with("libcudart")) {
          return 0;
        }
        *static_cast<std::string*>(found) = path;
        return 1;
      },
      &name);
  return name.empty() ? nullptr : dlopen(name.c_str(), RTLD_NOLOAD | RTLD_LAZY);
}

CudaRuntime findRuntime() {
  CudaRuntime found;
  const bool isGlobal = dlsym(RTLD_DEFAULT, "cudaHostRegister") != nullptr;
  void* library = isGlobal ? RTLD_DEFAULT : loadedRuntime();
  if (!isGlobal && library == nullptr) {
    return found;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
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
