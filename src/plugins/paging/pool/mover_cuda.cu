// See Note [Page pools]. Each pool operation is one launch. No operation waits for the host or
// allocates, so all operations can be captured.
//
// All blocks plan from the same state, and only the last block to finish changes the state, so no
// block sees a partial change. Each block increments a counter. The block that gets the highest
// number is the last, and the counter wraps to 0.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "plugins/paging/pool/mover.h"
#include "plugins/paging/pool/plan.h"

namespace ebb {
namespace {

// Note [How kernels move rows]
// The rows of a page are contiguous in the page and in the tensor. In a stack, all rows of a tensor
// are contiguous. Kernels cut each contiguous stretch into pieces, and each warp moves one piece at
// a time. So a warp computes addresses and waits for loads once per piece, not once per row. All
// threads of the warp are busy even if rows are narrow. Each thread loads four vectors before it
// stores the first. A vector is as wide as the alignments of source and destination allow, up to 16
// bytes. Threads move the bytes before the first vector and after the last vector one by one.
// Before the first store, kernels copy the pool's addresses and sizes into local variables.
// Otherwise the compiler would have to read the pool again after each store, since the stored bytes
// might belong to the pool.
constexpr int kThreads = 256;
constexpr int kWarp = 32;
constexpr int kInFlight = 4;
constexpr int kPiece = 2048;            // bytes: kInFlight vectors for each thread of a warp
constexpr int kBlocksPerProcessor = 3;  // as many as a multiprocessor has registers for
constexpr int kResetBlocks = 64;

// True for one thread of the grid: the first thread of the last block that calls this function. All
// reads and writes of other threads before their calls are ordered before this thread's later reads
// and writes: the barrier orders a block's threads, and the fences around the counter order blocks.
__device__ bool isLast(PagePoolState* pool) {
  __syncthreads();
  if (threadIdx.x != 0) {
    return false;
  }
  __threadfence();
  const bool last = atomicInc(&pool->blocksDone, gridDim.x - 1) == gridDim.x - 1;
  __threadfence();
  return last;
}

__device__ int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// The next three classes are sources of bytes for write(). `get` returns the vector at byte `at` of
// the source. Loads and stores of a vector are both aligned only if the vector's width divides
// `skew(to)`, where `to` is the destination.
struct Copied {
  const unsigned char* from;

  __device__ uintptr_t skew(const unsigned char* to) const { return to - from; }
  template <class T>
  __device__ T get(int at) const {
    return *reinterpret_cast<const T*>(from + at);
  }
};

struct Repeated {
  const unsigned char* from;
  unsigned width;  // period of the pattern in bytes

  __device__ uintptr_t skew(const unsigned char* to) const { return (to - from) | width; }
  template <class T>
  __device__ T get(int at) const {
    return *reinterpret_cast<const T*>(from + at % width);
  }
};

struct Filled {
  unsigned char value;

  __device__ uintptr_t skew(const unsigned char*) const { return 0; }
  template <class T>
  __device__ T get(int) const {
    const uint32_t four = value * 0x01010101U;
    if constexpr (sizeof(T) == sizeof(uint4)) {
      return T{four, four, four, four};
    } else {
      return static_cast<T>(four);
    }
  }
};

template <class T, class Source>
__device__ void writeAs(unsigned char* to, int bytes, const Source& source) {
  constexpr int kBytes = sizeof(T);
  const int lane = threadIdx.x % kWarp;
  const int aligned = -reinterpret_cast<uintptr_t>(to) % kBytes;
  const int head = aligned < bytes ? aligned : bytes;
  const int vectors = (bytes - head) / kBytes;
#pragma unroll 1  // unrolled by hand
  for (int first = lane; first < vectors; first += kInFlight * kWarp) {
    T values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int vector = first + i * kWarp;
      if (vector < vectors) {
        values[i] = source.template get<T>(head + vector * kBytes);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int vector = first + i * kWarp;
      if (vector < vectors) {
        *reinterpret_cast<T*>(to + head + vector * kBytes) = values[i];
      }
    }
  }
#pragma unroll 1
  for (int i = lane; i < bytes - vectors * kBytes; i += kWarp) {
    const int at = i < head ? i : i + vectors * kBytes;
    to[at] = source.template get<unsigned char>(at);
  }
}

// One warp writes `bytes` bytes from `source` to `to`.
template <class Source>
__device__ void write(unsigned char* to, int bytes, const Source& source) {
  const uintptr_t skew = source.skew(to);
  if (skew % 16 == 0) {
    writeAs<uint4>(to, bytes, source);
  } else if (skew % 4 == 0) {
    writeAs<uint32_t>(to, bytes, source);
  } else if (skew % 2 == 0) {
    writeAs<uint16_t>(to, bytes, source);
  } else {
    writeAs<unsigned char>(to, bytes, source);
  }
}

// Distributes `bytes` bytes over the grid's warps. The bytes consist of stretches of `stretch`
// bytes; the last stretch may be shorter. Each warp calls move(index of the stretch, offset in the
// stretch, bytes) for each of its pieces.
template <class Move>
__device__ void forEachPiece(int64_t bytes, int64_t stretch, const Move& move) {
  if (bytes <= 0) {
    return;
  }
  const int64_t perStretch = (stretch + kPiece - 1) / kPiece;
  const int64_t warps = gridDim.x * blockDim.x / kWarp;
  for (int64_t piece = (blockIdx.x * blockDim.x + threadIdx.x) / kWarp;; piece += warps) {
    const int64_t which = piece / perStretch;
    const int64_t offset = piece % perStretch * kPiece;
    const int64_t left = lesser(stretch - offset, bytes - which * stretch - offset);
    if (left <= 0) {
      return;
    }
    move(which, offset, static_cast<int>(lesser(left, kPiece)));
  }
}

// The grid's warps together set `bytes` bytes to `value`.
__device__ void fill(unsigned char* to, int64_t bytes, unsigned char value) {
  forEachPiece(bytes, bytes, [&](int64_t, int64_t offset, int here) {
    write(to + offset, here, Filled{value});
  });
}

// The grid's warps together fill `bytes` bytes with copies of `row`. Several copies of a narrow row
// form one stretch.
__device__ void fillWithRow(
    unsigned char* to, int64_t bytes, const unsigned char* row, int64_t rowBytes) {
  const bool isNarrow = rowBytes <= kPiece;
  const int64_t stretch = isNarrow ? kPiece / rowBytes * rowBytes : rowBytes;
  const auto width = static_cast<unsigned>(isNarrow ? rowBytes : kPiece);
  forEachPiece(bytes, stretch, [&](int64_t which, int64_t offset, int here) {
    write(to + which * stretch + offset, here, Repeated{row + offset, width});
  });
}

__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) stashKernel(
    PagePoolState* pool, PageTicketState* ticket, int64_t totalRows, const unsigned char* source,
    const int64_t* rows) {
  const PagePlan plan = planStash(*pool, *ticket, totalRows, *rows);
  if (plan.errors == 0) {
    const PageTier tier = pool->tiers[plan.tier];
    const bool isStack = pool->isStack != 0;
    const int64_t pageBytes = pool->pageRows * pool->rowBytes;
    const int64_t alive = plan.rows * pool->rowBytes;
    const auto move = [&](int64_t slot, int64_t offset, int bytes) {
      const int64_t page = pageToTake(isStack, tier, slot);
      if (offset == 0 && threadIdx.x % kWarp == 0 && !isStack) {
        ticket->pages()[slot] = page;
      }
      write(
          tier.rows + page * pageBytes + offset, bytes, Copied{source + slot * pageBytes + offset});
    };
    forEachPiece(alive, isStack ? alive : pageBytes, move);
  }
  if (isLast(pool)) {
    finishStash(*pool, *ticket, plan);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor) restoreKernel(
    PagePoolState* pool, PageTicketState* ticket, int64_t totalRows, unsigned char* destination,
    PageFill dead) {
  const PagePlan plan = planRestore(*pool, *ticket);
  const int64_t rowBytes = pool->rowBytes;
  const int64_t whole = totalRows * rowBytes;
  if (plan.errors != 0) {
    fill(destination, whole, dead.failed);
  } else {
    const PageTier tier = pool->tiers[plan.tier];
    const bool isStack = pool->isStack != 0;
    const int64_t pageBytes = pool->pageRows * rowBytes;
    const int64_t alive = plan.rows * rowBytes;
    const auto move = [&](int64_t slot, int64_t offset, int bytes) {
      const int64_t page = pageTaken(isStack, *ticket, slot);
      if (offset == 0 && threadIdx.x % kWarp == 0 && !isStack && !dead.keepsPages) {
        tier.free[(tier.tail + slot) % tier.capacity] = page;
      }
      write(
          destination + slot * pageBytes + offset, bytes,
          Copied{tier.rows + page * pageBytes + offset});
    };
    forEachPiece(alive, isStack ? alive : pageBytes, move);
    if (dead.deadRows == PageDeadRows::FirstRow && alive > 0) {
      const unsigned char* first = tier.rows + pageTaken(isStack, *ticket, 0) * pageBytes;
      fillWithRow(destination + alive, whole - alive, first, rowBytes);
    } else if (dead.deadRows != PageDeadRows::Untouched) {
      fill(destination + alive, whole - alive, dead.dead);
    }
  }
  if (isLast(pool)) {
    finishRestore(*pool, *ticket, plan, dead.keepsPages);
  }
}

// Runs in one block, because there is little work.
__global__ void giveBackKernel(PagePoolState* pool, PageTicketState* ticket) {
  const PagePlan plan = planGiveBack(*pool, *ticket);
  const PageTier tier = pool->tiers[plan.tier];
  const int64_t listed = pool->isStack != 0 ? 0 : plan.pages;
  for (int64_t slot = threadIdx.x; slot < listed; slot += blockDim.x) {
    tier.free[(tier.tail + slot) % tier.capacity] = ticket->pages()[slot];
  }
  __syncthreads();
  if (threadIdx.x == 0 && plan.pages > 0) {
    finishGiveBack(*pool, *ticket, plan);
  }
}

// Only the grid's first thread changes the pool's counters and error bits. No other thread reads
// these fields, so the first thread need not wait for other blocks.
__global__ void resetKernel(PagePoolState* pool) {
  const int64_t first = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  const int64_t stride = gridDim.x * static_cast<int64_t>(blockDim.x);
  const bool isStack = pool->isStack != 0;
  for (PageTier& tier : pool->tiers) {
    const int64_t capacity = tier.capacity;
    int64_t* const free = tier.free;
    for (int64_t id = first; id < capacity && !isStack; id += stride) {
      free[id] = id;
    }
    if (first == 0) {
      tier.head = 0;
      tier.tail = capacity;
    }
  }
  if (first == 0) {
    pool->errors = 0;
    pool->spilled = 0;
    ++pool->epoch;
  }
}

void check(cudaError_t error) {
  if (error != cudaSuccess) {
    throw std::runtime_error(
        std::string("ebb: a kernel of a page pool failed: ") + cudaGetErrorString(error));
  }
}

// The number of blocks for a tensor. There is a warp for each piece, but there are no more blocks
// than can run at a time: further blocks would only wait, and isLast() would have to count them.
int blocksFor(PageRows whole) {
  int device = 0;
  int processors = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int64_t blockBytes = kPiece * (kThreads / kWarp);
  const int64_t blocks = (whole.count * whole.bytes + blockBytes - 1) / blockBytes;
  return static_cast<int>(std::clamp<int64_t>(blocks, 1, processors * kBlocksPerProcessor));
}

class CudaPageMover final : public PageMover {
 public:
  void stash(
      PagePoolState* pool, PageTicketState* ticket, PageRows whole, const void* source,
      const int64_t* rows, void* stream) const override {
    stashKernel<<<blocksFor(whole), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        pool, ticket, whole.count, static_cast<const unsigned char*>(source), rows);
    check(cudaGetLastError());
  }

  void restore(
      PagePoolState* pool, PageTicketState* ticket, PageRows whole, void* destination,
      PageFill fill, void* stream) const override {
    restoreKernel<<<blocksFor(whole), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        pool, ticket, whole.count, static_cast<unsigned char*>(destination), fill);
    check(cudaGetLastError());
  }

  void giveBack(PagePoolState* pool, PageTicketState* ticket, void* stream) const override {
    giveBackKernel<<<1, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(pool, ticket);
    check(cudaGetLastError());
  }

  void reset(PagePoolState* pool, void* stream) const override {
    resetKernel<<<kResetBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(pool);
    check(cudaGetLastError());
  }
};

}  // namespace
}  // namespace ebb

// libebb looks up this symbol after loading the library.
extern "C" __attribute__((visibility("default"))) const ebb::PageMover* ebbCudaPageMover() {
  static const ebb::CudaPageMover mover;
  return &mover;
}
