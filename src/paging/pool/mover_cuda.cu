// See Note [Page pools]. One launch for each call; nothing waits for the host or allocates, so all
// of it can be captured.
//
// Every block decides on the same state, which only the last block to finish changes: so nobody
// sees half of a change. Whoever is last is told by a count that resets itself.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "paging/pool/mover.h"
#include "paging/pool/plan.h"

namespace ebb {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 2048;
constexpr int kResetBlocks = 64;

// Whether this block is the last one that gets here. What all blocks read and wrote comes before
// what it does next: the barrier orders a block's threads, and the fences around the count, by the
// thread that counts, order blocks.
__device__ bool isLastBlock(PagePoolState* pool) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicInc(&pool->blocksDone, gridDim.x - 1) == gridDim.x - 1;
    __threadfence();
  }
  __syncthreads();
  return last;
}

template <class T>
__device__ void copyRow(unsigned char* to, const unsigned char* from, int64_t bytes) {
  auto* target = reinterpret_cast<T*>(to);
  const auto* source = reinterpret_cast<const T*>(from);
  const int64_t count = bytes / static_cast<int64_t>(sizeof(T));
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) {
    target[i] = source[i];
  }
}

__device__ void fillBytes(unsigned char* begin, unsigned char* end, unsigned char value) {
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t stride = gridDim.x * static_cast<int64_t>(blockDim.x);
  for (unsigned char* at = begin + first; at < end; at += stride) {
    *at = value;
  }
}

// Where a row of a tensor is in its tier: `page` is the id of the page that it is in.
__device__ unsigned char* placeOf(
    const PagePoolState& pool, const PageTier& tier, int64_t page, int64_t row) {
  return tier.rows + (page * pool.pageRows + row % pool.pageRows) * pool.rowBytes;
}

template <class T>
__global__ void stashKernel(
    PagePoolState* pool,
    PageTicketState* ticket,
    int64_t totalRows,
    const unsigned char* source,
    const int64_t* rows) {
  const PagePlan plan = planStash(*pool, *ticket, totalRows, *rows);
  if (plan.errors == 0) {
    const PageTier& tier = pool->tiers[plan.tier];
    for (int64_t row = blockIdx.x; row < plan.rows; row += gridDim.x) {
      const int64_t slot = row / pool->pageRows;
      const int64_t page = pageToTake(*pool, tier, slot);
      if (row % pool->pageRows == 0 && threadIdx.x == 0 && pool->isStack == 0) {
        ticket->pages()[slot] = page;
      }
      copyRow<T>(placeOf(*pool, tier, page, row), source + row * pool->rowBytes, pool->rowBytes);
    }
  }
  if (isLastBlock(pool) && threadIdx.x == 0) {
    finishStash(*pool, *ticket, plan);
  }
}

template <class T>
__global__ void restoreKernel(
    PagePoolState* pool,
    PageTicketState* ticket,
    int64_t totalRows,
    unsigned char* destination,
    PageFill fill) {
  const PagePlan plan = planRestore(*pool, *ticket);
  unsigned char* const end = destination + totalRows * pool->rowBytes;
  if (plan.errors != 0) {
    fillBytes(destination, end, fill.failed);
  } else {
    const PageTier& tier = pool->tiers[plan.tier];
    for (int64_t row = blockIdx.x; row < plan.rows; row += gridDim.x) {
      const int64_t slot = row / pool->pageRows;
      const int64_t page = pageTaken(*pool, *ticket, slot);
      const bool first = row % pool->pageRows == 0 && threadIdx.x == 0;
      if (first && !fill.keepsPages && pool->isStack == 0) {
        tier.free[(tier.tail + slot) % tier.capacity] = page;
      }
      copyRow<T>(
          destination + row * pool->rowBytes, placeOf(*pool, tier, page, row), pool->rowBytes);
    }
    const bool copies = fill.deadRows == PageDeadRows::FirstRow && plan.rows > 0;
    for (int64_t row = plan.rows + blockIdx.x; row < totalRows && copies; row += gridDim.x) {
      const unsigned char* first = placeOf(*pool, tier, pageTaken(*pool, *ticket, 0), 0);
      copyRow<T>(destination + row * pool->rowBytes, first, pool->rowBytes);
    }
    if (!copies && fill.deadRows != PageDeadRows::Untouched) {
      fillBytes(destination + plan.rows * pool->rowBytes, end, fill.dead);
    }
  }
  if (isLastBlock(pool) && threadIdx.x == 0) {
    finishRestore(*pool, *ticket, plan, fill.keepsPages);
  }
}

// One block: there is little to do.
__global__ void giveBackKernel(PagePoolState* pool, PageTicketState* ticket) {
  const PagePlan plan = planGiveBack(*pool, *ticket);
  const PageTier& tier = pool->tiers[plan.tier];
  for (int64_t slot = threadIdx.x; slot < plan.pages && pool->isStack == 0; slot += blockDim.x) {
    tier.free[(tier.tail + slot) % tier.capacity] = ticket->pages()[slot];
  }
  __syncthreads();
  if (threadIdx.x == 0 && plan.pages > 0) {
    finishGiveBack(*pool, *ticket, plan);
  }
}

__global__ void resetKernel(PagePoolState* pool) {
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t stride = gridDim.x * static_cast<int64_t>(blockDim.x);
  for (PageTier& tier : pool->tiers) {
    for (int64_t id = first; id < tier.capacity && pool->isStack == 0; id += stride) {
      tier.free[id] = id;
    }
  }
  if (isLastBlock(pool) && threadIdx.x == 0) {
    for (PageTier& tier : pool->tiers) {
      tier.head = 0;
      tier.tail = tier.capacity;
    }
    pool->errors = 0;
    pool->spilled = 0;
    ++pool->epoch;
  }
}

int blocksFor(int64_t rows) {
  return static_cast<int>(std::clamp<int64_t>(rows, 1, kMostBlocks));
}

// Calls `kernel` with a value of the widest type in which rows can be read and written.
template <class Kernel>
void withWidest(int64_t rowBytes, const void* tensor, const Kernel& kernel) {
  const auto address = reinterpret_cast<uintptr_t>(tensor);
  const auto fits = [&](uintptr_t bytes) { return (address | rowBytes) % bytes == 0; };
  if (fits(16)) {
    kernel(uint4{});
  } else if (fits(4)) {
    kernel(uint32_t{});
  } else if (fits(2)) {
    kernel(uint16_t{});
  } else {
    kernel(static_cast<unsigned char>(0));
  }
}

void checkLaunch() {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("ebb: page kernel: ") + cudaGetErrorString(error));
  }
}

class CudaPageMover final : public PageMover {
 public:
  void stash(
      PagePoolState* pool,
      PageTicketState* ticket,
      PageRows whole,
      const void* source,
      const int64_t* rows,
      void* stream) const override {
    withWidest(whole.bytes, source, [&](auto chunk) {
      stashKernel<decltype(chunk)>
          <<<blocksFor(whole.count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
              pool, ticket, whole.count, static_cast<const unsigned char*>(source), rows);
    });
    checkLaunch();
  }

  void restore(
      PagePoolState* pool,
      PageTicketState* ticket,
      PageRows whole,
      void* destination,
      PageFill fill,
      void* stream) const override {
    withWidest(whole.bytes, destination, [&](auto chunk) {
      restoreKernel<decltype(chunk)>
          <<<blocksFor(whole.count), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
              pool, ticket, whole.count, static_cast<unsigned char*>(destination), fill);
    });
    checkLaunch();
  }

  void giveBack(PagePoolState* pool, PageTicketState* ticket, void* stream) const override {
    giveBackKernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(pool, ticket);
    checkLaunch();
  }

  void reset(PagePoolState* pool, void* stream) const override {
    resetKernel<<<kResetBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(pool);
    checkLaunch();
  }
};

}  // namespace
}  // namespace ebb

// What libebb looks up when it loads this library.
extern "C" __attribute__((visibility("default"))) const ebb::PageMover* ebbCudaPageMover() {
  static const ebb::CudaPageMover mover;
  return &mover;
}
