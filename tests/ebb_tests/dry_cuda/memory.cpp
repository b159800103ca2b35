// Memory of devices and pinned memory of the host; copies.
#include <sys/mman.h>

#include <cstring>

#include "dry.h"

#undef cudaMallocAsync
#undef cudaMemcpyAsync
#undef cudaMemsetAsync
#undef cudaMemcpy
#undef cudaMemset

namespace dry {

std::map<char*, Block>& blocks() {
  static auto* made = new std::map<char*, Block>;
  return *made;
}

size_t& usedBytes(int device) {
  static size_t used[kMostDevices];
  return used[device];
}

namespace {

cudaError_t allocate(void** result, size_t nbytes, bool isHost) {
  std::lock_guard guard(lock());
  size_t& used = usedBytes(currentDevice());
  if (!isHost && used + nbytes > settings().memory) {
    return failed(cudaErrorMemoryAllocation);
  }
  void* memory = mmap(
      nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return failed(cudaErrorMemoryAllocation);
  }
  blocks()[static_cast<char*>(memory)] = {nbytes, currentDevice(), isHost};
  if (!isHost) {
    used += nbytes;
  }
  *result = memory;
  return cudaSuccess;
}

cudaError_t release(void* memory) {
  if (memory == nullptr) {
    return cudaSuccess;
  }
  std::lock_guard guard(lock());
  const auto found = blocks().find(static_cast<char*>(memory));
  if (found == blocks().end()) {
    fprintf(stderr, "dry CUDA: %p is freed, but is not allocated\n", memory);
    return failed(cudaErrorInvalidValue);
  }
  const Block block = found->second;
  if (!block.isHost) {
    usedBytes(block.device) -= block.nbytes;
  }
  munmap(memory, block.nbytes);
  blocks().erase(found);
  return cudaSuccess;
}

// The block that an address is in; null if there is none. The caller holds lock().
const Block* blockOf(const void* address) {
  auto after = blocks().upper_bound(static_cast<char*>(const_cast<void*>(address)));
  if (after == blocks().begin()) {
    return nullptr;
  }
  const auto& [start, block] = *--after;
  return address < start + block.nbytes ? &block : nullptr;
}

bool isOnDevice(const void* address) {
  const Block* block = blockOf(address);
  return block != nullptr && !block->isHost;
}

// The speed of the link holds for copies between host and device.
cudaError_t copy(void* to, const void* from, size_t nbytes, cudaStream_t stream) {
  if (nbytes == 0) {
    return cudaSuccess;
  }
  {
    std::lock_guard guard(lock());
    const bool out = isOnDevice(from), in = isOnDevice(to);
    if (FILE* log = settings().log) {
      const char* way = out && in ? "device" : in ? "h2d" : out ? "d2h" : "host";
      fprintf(log, "C %d %p %s %zu\n", currentDevice(), static_cast<void*>(stream), way, nbytes);
    }
    append(stream, out == in ? settings().kernelMs : double(nbytes) * settings().msPerByte);
  }
  memmove(to, from, nbytes);
  return cudaSuccess;
}

}  // namespace
}  // namespace dry

using namespace dry;

DRY_API cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  std::lock_guard guard(lock());
  *total = settings().memory;
  *free = settings().memory - usedBytes(currentDevice());
  return cudaSuccess;
}

DRY_API cudaError_t cudaMalloc(void** result, size_t nbytes) {
  return allocate(result, nbytes, false);
}

DRY_API cudaError_t cudaFree(void* memory) { return release(memory); }

DRY_API cudaError_t cudaMallocAsync(void** result, size_t nbytes, cudaStream_t) {
  return allocate(result, nbytes, false);
}

DRY_API cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return release(memory); }

DRY_API cudaError_t cudaHostAlloc(void** result, size_t nbytes, unsigned) {
  return allocate(result, nbytes, true);
}

DRY_API cudaError_t cudaFreeHost(void* memory) { return release(memory); }

DRY_API cudaError_t cudaHostRegister(void* memory, size_t nbytes, unsigned) {
  std::lock_guard guard(lock());
  blocks()[static_cast<char*>(memory)] = {nbytes, currentDevice(), true};
  return cudaSuccess;
}

DRY_API cudaError_t cudaHostUnregister(void* memory) {
  std::lock_guard guard(lock());
  blocks().erase(static_cast<char*>(memory));
  return cudaSuccess;
}

DRY_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* result, const void* address) {
  std::lock_guard guard(lock());
  const Block* block = blockOf(address);
  memset(result, 0, sizeof *result);
  result->type = block == nullptr ? cudaMemoryTypeUnregistered
                 : block->isHost  ? cudaMemoryTypeHost
                                  : cudaMemoryTypeDevice;
  result->device = block != nullptr ? block->device : -1;
  void* pointer = const_cast<void*>(address);
  result->devicePointer = block != nullptr ? pointer : nullptr;
  result->hostPointer = block != nullptr && block->isHost ? pointer : nullptr;
  return cudaSuccess;
}

DRY_API cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  const cudaError_t error = copy(to, from, nbytes, nullptr);
  sleepUntil(clockOf(nullptr).until);
  return error;
}

DRY_API cudaError_t
cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, nbytes, stream);
}

DRY_API cudaError_t
cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, cudaStream_t stream) {
  return copy(to, from, nbytes, stream);
}

DRY_API cudaError_t cudaMemset(void* memory, int value, size_t nbytes) {
  memset(memory, value, nbytes);
  return cudaSuccess;
}

DRY_API cudaError_t cudaMemsetAsync(void* memory, int value, size_t nbytes, cudaStream_t stream) {
  memset(memory, value, nbytes);
  std::lock_guard guard(lock());
  append(stream, settings().kernelMs);
  return cudaSuccess;
}

DRY_API cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return cudaSuccess;
}

DRY_API cudaError_t cudaGetSymbolAddress(void** result, const void*) {
  static char scratch[1 << 16];
  *result = scratch;
  return cudaSuccess;
}

DRY_API size_t dry_cuda_used(int device) {
  std::lock_guard guard(lock());
  return usedBytes(device);
}
