#include "memory/cuda_runtime.h"

#include <dlfcn.h>
#include <link.h>

#include <string>
#include <type_traits>

namespace ebb {
namespace {

struct Search {
  std::string_view library;
  std::string path;  // of the library; empty: not found
};

int compare(dl_phdr_info* loaded, size_t, void* data) {
  auto& search = *static_cast<Search*>(data);
  // The file's name may go on with a hash, as in some archives of libtorch.
  const std::string_view path = loaded->dlpi_name;
  if (!path.substr(path.rfind('/') + 1).starts_with(search.library)) {
    return 0;
  }
  search.path = path;
  return 1;
}

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

void* findLoaded(std::string_view library, const char* symbol) {
  if (void* global = dlsym(RTLD_DEFAULT, symbol)) {
    return global;
  }
  Search search{library, {}};
  dl_iterate_phdr(&compare, &search);
  void* loaded =
      search.path.empty() ? nullptr : dlopen(search.path.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  return loaded == nullptr ? nullptr : dlsym(loaded, symbol);
}

const CudaRuntime& cudaRuntime() {
  static const CudaRuntime functions = findRuntime();
  return functions;
}

}  // namespace ebb
