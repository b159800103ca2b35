// The movers for each kind of device.
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <string>

#include "plugins/paging/pool/pool.h"

namespace ebb {
namespace {

std::atomic<const PageMover*>& outOfTree(c10::DeviceType type) {
  static std::array<std::atomic<const PageMover*>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> movers{};
  return movers[static_cast<size_t>(type)];
}

std::string folderOfThisLibrary() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&folderOfThisLibrary), &info) == 0) {
    return {};
  }
  const std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

// Returns the mover in libebb_cuda, a library beside this one; null if ebb was built without nvcc.
const PageMover* loadCudaPageMover() {
  void* library = dlopen((folderOfThisLibrary() + "libebb_cuda.so").c_str(), RTLD_NOW);
  if (library == nullptr) {
    return nullptr;
  }
  using Get = const PageMover* (*)();
  const auto get = reinterpret_cast<Get>(dlsym(library, "ebbCudaPageMover"));
  return get == nullptr ? nullptr : get();
}

}  // namespace

bool hasPageMover(c10::DeviceType type) {
  return type == c10::kCPU || type == c10::kCUDA || outOfTree(type).load() != nullptr;
}

const PageMover& pageMoverOf(c10::Device device) {
  if (device.is_cpu()) {
    return cpuPageMover();
  }
  if (device.is_cuda()) {
    static const PageMover* cudas = loadCudaPageMover();
    TORCH_CHECK_NOT_IMPLEMENTED(
        cudas != nullptr,
        "ebb: PAGE on a CUDA device needs ebb's kernels, and this installation was built without "
        "nvcc. Install a CUDA Toolkit and build ebb again with EBB_CUDA=1.");
    return *cudas;
  }
  const PageMover* mover = outOfTree(device.type()).load();
  TORCH_CHECK_NOT_IMPLEMENTED(
      mover != nullptr, "ebb: PAGE has kernels for CPU and CUDA, not for ", device);
  return *mover;
}

void setPageMover(c10::DeviceType type, const PageMover* mover) { outOfTree(type).store(mover); }

}  // namespace ebb
