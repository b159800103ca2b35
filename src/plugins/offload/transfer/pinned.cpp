#include "plugins/offload/transfer/pinned.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <climits>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "memory/bytes.h"
#include "memory/cuda_runtime.h"

namespace ebb {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kPartOfThread = size_t{32} << 20;  // bytes; fewer are not worth a thread
constexpr size_t kMostThreads = 8;

// Note [Memory near the device]
// On a machine with several memory nodes (NUMA), copies between a device and another node's memory
// are slower, on some machines a third as fast. A process that is not bound to its device's node
// gets memory on the node where it happens to run. So pinned memory is placed on the node of its
// device, while that node has room. If the process may not use that node (cpuset), the placement
// does not change.

// A set of memory nodes, in the format of the system call mbind.
constexpr int kNodes = 1024;
constexpr int kBits = CHAR_BIT * sizeof(unsigned long);
using Nodes = std::array<unsigned long, kNodes / kBits>;

// The node nearest to a PCI device, such as 0000:3B:00.0; -1 if unknown.
int nodeOfPciDevice(const std::string& busId) {
  std::string name = busId;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char letter) {
    return static_cast<char>(std::tolower(letter));
  });
  std::ifstream file("/sys/bus/pci/devices/" + name + "/numa_node");
  int node = -1;
  return file >> node && node >= 0 && node < kNodes ? node : -1;
}

// Asks Linux to place the untouched pages of `memory` on `node`, if possible. Uses a system call,
// since libnuma may be missing. If the call fails, the placement does not change.
void preferNode(void* memory, size_t nbytes, int node) {
  Nodes nodes{};
  nodes[node / kBits] = 1UL << (node % kBits);
  ::syscall(SYS_mbind, memory, nbytes, MPOL_PREFERRED, nodes.data(), kNodes, 0);
}

int nodeOf(c10::Device device) {
  static std::mutex mutex;  // guards known
  static std::map<c10::DeviceIndex, int> known;
  std::lock_guard<std::mutex> lock(mutex);
  const auto [place, isNew] = known.emplace(device.index(), -1);
  std::array<char, 64> busId{};
  const auto& runtime = cudaRuntime();
  if (isNew && runtime.busId != nullptr) {
    if (runtime.busId(busId.data(), busId.size(), device.index()) == 0) {
      place->second = nodeOfPciDevice(busId.data());
    } else {
      runtime.forgetError();
    }
  }
  return place->second;
}

// Owns newly mapped pages. Linux gives a page memory at the first write to the page, so
// preferNode() can still choose the node.
struct Pages {
  explicit Pages(size_t nbytes)
      : memory(::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
        nbytes(nbytes),
        process(::getpid()) {}
  // In a child of fork() the pages are not registered, and the child must not call CUDA's runtime.
  ~Pages() {
    if (isRegistered && process == ::getpid()) {
      const RelaxedCaptures relaxed;
      cudaRuntime().drop(memory);
    }
    if (isMapped()) {
      ::munmap(memory, nbytes);
    }
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  bool isMapped() const { return memory != MAP_FAILED; }

  void* memory;
  size_t nbytes;
  pid_t process;
  bool isRegistered = false;
};

void touch(char* from, const char* to) {
  for (; from < to; from += kPage) {
    *static_cast<volatile char*>(from) = 0;
  }
}

// Writes to each page, so that Linux gives the page memory. Uses several threads, because the
// registration would do this work on one thread. If ebb cannot start threads, the registration does
// the work.
void touchAll(const Pages& pages) {
  const size_t count = std::min(
      {pages.nbytes / kPartOfThread, kMostThreads, size_t{std::thread::hardware_concurrency()}});
  auto* const memory = static_cast<char*>(pages.memory);
  std::vector<std::thread> threads;
  try {
    for (size_t i = 0; count > 1 && i < count; ++i) {
      const size_t all = pages.nbytes / kPage;
      threads.emplace_back(
          &touch, memory + all * i / count * kPage, memory + all * (i + 1) / count * kPage);
    }
  } catch (const std::system_error&) {
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

// Prepares the pages before their first use. Steps that the system refuses are skipped.
void prepare(const Pages& pages, c10::Device device) {
  if (const int node = nodeOf(device); node >= 0) {
    preferNode(pages.memory, pages.nbytes, node);
  }
  ::madvise(pages.memory, pages.nbytes, MADV_WIPEONFORK);  // see Note [Pinned memory and fork]
  if (pages.nbytes >= kHugePage) {
    ::madvise(pages.memory, pages.nbytes, MADV_HUGEPAGE);
  }
  touchAll(pages);
}

// Registers the pages with CUDA's runtime. Returns false if the runtime refuses. Makes `device` the
// current device, since the call creates a CUDA context on the thread's current device: device 0
// for every thread that never chose a device.
bool registerPages(const Pages& pages, c10::Device device) {
  constexpr unsigned kPortable = 1;  // cudaHostRegisterPortable: pinned for all devices
  std::optional<c10::DeviceGuard> guard;
  if (c10::impl::hasDeviceGuardImpl(device.type())) {
    guard.emplace(device);
  }
  const bool isRegistered = cudaRuntime().add(pages.memory, pages.nbytes, kPortable) == 0;
  if (!isRegistered) {
    cudaRuntime().forgetError();
  }
  return isRegistered;
}

}  // namespace

c10::Storage allocatePinned(size_t nbytes, c10::Device device) {
  const RelaxedCaptures relaxed;
  if (device.is_cuda() && cudaRuntime().add != nullptr && cudaRuntime().drop != nullptr) {
    auto pages = std::make_unique<Pages>((nbytes + kPage - 1) / kPage * kPage);
    if (pages->isMapped()) {
      prepare(*pages, device);
      pages->isRegistered = registerPages(*pages, device);
    }
    if (pages->isRegistered) {
      void* memory = pages->memory;
      const auto freePages = [](void* pages) { delete static_cast<Pages*>(pages); };
      return c10::Storage(
          c10::Storage::use_byte_size_t(), nbytes,
          c10::DataPtr(memory, pages.release(), freePages, c10::Device(c10::kCPU)));
    }
  }
  return allocate(nbytes, c10::TensorOptions(c10::kCPU).pinned_memory(true));
}

}  // namespace ebb
