#include "memory/pinned.h"

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>

#include "memory/bytes.h"
#include "memory/numa_node.h"

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

struct Runtime {
  int (*add)(void*, size_t, unsigned) = nullptr;  // cudaHostRegister
  int (*drop)(void*) = nullptr;                   // cudaHostUnregister
  int (*lastError)() = nullptr;                   // cudaGetLastError
  int (*busId)(char*, int, int) = nullptr;        // cudaDeviceGetPCIBusId
};

const Runtime& runtime() {
  static const Runtime functions = [] {
    Runtime found;
    if (void* library = cudaRuntime()) {
      const auto find = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      };
      find(found.add, "cudaHostRegister");
      find(found.drop, "cudaHostUnregister");
      find(found.lastError, "cudaGetLastError");
      find(found.busId, "cudaDeviceGetPCIBusId");
    }
    return found;
  }();
  return functions;
}

int nodeOf(c10::Device device) {
  static std::mutex mutex;  // guards known
  static std::map<c10::DeviceIndex, int> known;
  std::lock_guard<std::mutex> lock(mutex);
  const auto [place, isNew] = known.emplace(device.index(), -1);
  std::array<char, 64> busId{};
  if (isNew && runtime().busId != nullptr &&
      runtime().busId(busId.data(), busId.size(), device.index()) == 0) {
    place->second = nodeOfPciDevice(busId.data());
  }
  return place->second;
}

// Pages of their own: none of them has been on another node.
struct Pages {
  explicit Pages(size_t nbytes)
      : memory(::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
        nbytes(nbytes) {
  }
  ~Pages() {
    if (isRegistered) {
      runtime().drop(memory);
    }
    if (isMapped()) {
      ::munmap(memory, nbytes);
    }
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  bool isMapped() const {
    return memory != MAP_FAILED;
  }

  void* memory;
  size_t nbytes;
  bool isRegistered = false;
};

void freePages(void* pages) {
  delete static_cast<Pages*>(pages);
}

}  // namespace

c10::Storage allocatePinned(size_t nbytes, c10::Device device) {
  constexpr size_t kPage = 4096;
  constexpr unsigned kPortable = 1;  // cudaHostRegisterPortable: pinned for all devices
  if (runtime().add != nullptr && runtime().drop != nullptr) {
    auto pages = std::make_unique<Pages>((nbytes + kPage - 1) / kPage * kPage);
    if (pages->isMapped()) {
      if (const int node = nodeOf(device); node >= 0) {
        preferNode(pages->memory, pages->nbytes, node);
      }
      pages->isRegistered = runtime().add(pages->memory, pages->nbytes, kPortable) == 0;
    }
    if (!pages->isRegistered && runtime().lastError != nullptr) {
      runtime().lastError();  // forgotten: torch's next kernel would seem to have failed
    }
    if (pages->isRegistered) {
      void* memory = pages->memory;
      return c10::Storage(
          c10::Storage::use_byte_size_t(),
          nbytes,
          c10::DataPtr(memory, pages.release(), &freePages, c10::Device(c10::kCPU)));
    }
  }
  return allocate(nbytes, c10::TensorOptions(c10::kCPU).pinned_memory(true));
}

}  // namespace ebb
