// The movers for each kind of device.
#include <dlfcn.h>

#include <atomic>
#include <string>

#include "plugins/paging/pool/pool.h"

namespace ebb {
namespace {

std::atomic<const PageMover*> outOfTree = nullptr;  // of devices of type PrivateUse1

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
  return type == c10::kCPU || type == c10::kCUDA ||
         (type == c10::kPrivateUse1 && outOfTree.load() != nullptr);
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
  const PageMover* mover = device.is_privateuseone() ? outOfTree.load() : nullptr;
  TORCH_CHECK_NOT_IMPLEMENTED(
      mover != nullptr, "ebb: PAGE has kernels for CPU and CUDA, not for ", device);
  return *mover;
}

void setPageMover(const PageMover* mover) { outOfTree.store(mover); }

}  // namespace ebb
