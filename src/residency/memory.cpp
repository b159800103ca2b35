#include "residency/memory.h"

#include <ATen/ops/empty.h>
#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "intercept/key.h"

namespace ebb {
namespace {

// CUDA's runtime in this process, or null.
void* cudaRuntime() {
  std::string name;
  dl_iterate_phdr(
      [](dl_phdr_info* library, size_t, void* found) {
        const bool isIt =
            std::string_view(library->dlpi_name).find("libcudart.so") != std::string_view::npos;
        if (isIt) {
          *static_cast<std::string*>(found) = library->dlpi_name;
        }
        return isIt ? 1 : 0;
      },
      &name);
  return name.empty() ? nullptr : dlopen(name.c_str(), RTLD_NOLOAD | RTLD_LAZY);
}

struct Registration {
  int (*add)(void*, size_t, unsigned) = nullptr;  // cudaHostRegister
  int (*drop)(void*) = nullptr;                   // cudaHostUnregister
};

const Registration& registration() {
  static const Registration functions = [] {
    Registration found;
    if (void* runtime = cudaRuntime()) {
      found.add = reinterpret_cast<decltype(found.add)>(dlsym(runtime, "cudaHostRegister"));
      found.drop = reinterpret_cast<decltype(found.drop)>(dlsym(runtime, "cudaHostUnregister"));
    }
    return found;
  }();
  return functions;
}

void freeRegistered(void* memory) {
  registration().drop(memory);
  std::free(memory);
}

}  // namespace

c10::impl::ForceDispatchKeyGuard belowEverything() {
  return {c10::DispatchKeySet(c10::DispatchKey::BackendSelect), keysAboveKernels()};
}

c10::Storage allocateBytes(size_t nbytes, const c10::TensorOptions& options) {
  const auto below = belowEverything();
  return at::empty({static_cast<int64_t>(nbytes)}, options.dtype(c10::ScalarType::Byte)).storage();
}

c10::Storage allocatePinned(size_t nbytes) {
  constexpr size_t kPage = 4096;
  constexpr unsigned kPortable = 1;  // cudaHostRegisterPortable: pinned for all devices
  if (registration().add != nullptr && registration().drop != nullptr) {
    const size_t whole = (nbytes + kPage - 1) / kPage * kPage;
    void* memory = std::aligned_alloc(kPage, whole);
    if (memory != nullptr && registration().add(memory, whole, kPortable) == 0) {
      return c10::Storage(
          c10::Storage::use_byte_size_t(),
          nbytes,
          c10::DataPtr(memory, memory, &freeRegistered, c10::Device(c10::kCPU)));
    }
    std::free(memory);
  }
  return allocateBytes(nbytes, c10::TensorOptions(c10::kCPU).pinned_memory(true));
}

}  // namespace ebb
