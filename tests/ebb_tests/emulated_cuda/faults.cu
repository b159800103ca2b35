// Kernels that are right, and the same with a fault each: what the emulation must see, and what it
// must not. The program runs one of them, by name, in so many schedules.
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

namespace {

constexpr int kBlocks = 3;
constexpr int kPerBlock = 4;
constexpr unsigned kAll = kBlocks * kPerBlock;

struct Memory {
  unsigned* cells;  // one for each thread
  unsigned* sum;
  unsigned* done;
};

__device__ unsigned me() { return blockIdx.x * blockDim.x + threadIdx.x; }

// The last block adds what all wrote.
template <bool kBarrier, bool kFence, bool kLastFence>
__global__ void addsLast(Memory memory) {
  __shared__ bool last;
  memory.cells[me()] = me();
  if (kBarrier) {
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    if (kFence) {
      __threadfence();
    }
    last = atomicInc(memory.done, gridDim.x - 1) == gridDim.x - 1;
    if (kLastFence) {
      __threadfence();
    }
  }
  __syncthreads();
  for (unsigned cell = 0; cell < kAll && last && threadIdx.x == 1; ++cell) {
    *memory.sum += memory.cells[cell];
  }
}

template <bool kBarrier, bool kWrites>
__global__ void tellsBlock(Memory memory) {
  __shared__ unsigned told;
  if (threadIdx.x == 0 && kWrites) {
    told = blockIdx.x;
  }
  if (kBarrier) {
    __syncthreads();
  }
  memory.cells[me()] = told;
}

// Half of the threads return before the others wait.
__global__ void returnsEarly(Memory memory) {
  if (threadIdx.x % 2 == 0) {
    return;
  }
  memory.cells[me() - 1] = 1;
  __syncthreads();
  if (threadIdx.x == 1) {
    memory.cells[me()] = memory.cells[me() + 1];
  }
}

__global__ void waitsInTwoLines(Memory) {
  if (threadIdx.x == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void writesAt(unsigned* cell) { *cell = 1; }

__global__ void writesWide(unsigned* cells) {
  reinterpret_cast<uint4*>(cells)[threadIdx.x] = uint4{1, 2, 3, 4};
}

__global__ void readsTheCount(Memory memory) {
  atomicInc(memory.done, gridDim.x - 1);
  memory.cells[me()] = *memory.done;
}

void launch(const std::string& name, Memory memory) {
  const std::map<std::string, void (*)(Memory)> kernels = {
      {"adds last", &addsLast<true, true, true>},
      {"no barrier before the count", &addsLast<false, true, true>},
      {"no fence before the count", &addsLast<true, false, true>},
      {"no fence after the count", &addsLast<true, true, false>},
      {"tells its block", &tellsBlock<true, true>},
      {"no barrier after shared memory", &tellsBlock<false, true>},
      {"nobody wrote shared memory", &tellsBlock<true, false>},
      {"returns early", &returnsEarly},
      {"waits in two lines", &waitsInTwoLines},
      {"reads the count", &readsTheCount},
  };
  unsigned onTheHost = 0;
  if (const auto found = kernels.find(name); found != kernels.end()) {
    found->second<<<kBlocks, kPerBlock, 0, nullptr>>>(memory);
  } else if (name == "writes past the end") {
    writesAt<<<1, 1, 0, nullptr>>>(memory.cells + kAll);
  } else if (name == "writes where the host has memory") {
    writesAt<<<1, 1, 0, nullptr>>>(&onTheHost);
  } else if (name == "all write the same") {
    writesAt<<<kBlocks, 1, 0, nullptr>>>(memory.cells);
  } else if (name == "writes wide") {
    writesWide<<<1, 3, 0, nullptr>>>(memory.cells);
  } else if (name == "writes wide, misaligned") {
    writesWide<<<1, 1, 0, nullptr>>>(memory.cells + 1);
  } else {
    emulated::fail("there is no such kernel");
  }
}

}  // namespace

int main(int, char** arguments) {
  const std::string name = arguments[1];
  for (int schedule = 0; schedule < std::atoi(arguments[2]); ++schedule) {
    emulated::seed(schedule);
    emulated::scheduling.residentBlocks = 1 + schedule % kBlocks;
    auto allocate = [](unsigned count, const char* what) {
      return static_cast<unsigned*>(emulated::allocate(count * sizeof(unsigned), 0, what));
    };
    const Memory memory{allocate(kAll, "cells"), allocate(1, "the sum"), allocate(1, "the count")};
    *memory.sum = 0;
    *memory.done = 0;
    launch(name, memory);
    if (name == "adds last" && *memory.sum != kAll * (kAll - 1) / 2) {
      emulated::fail("the sum is wrong");
    }
    for (int buffer = 0; buffer < 3; ++buffer) {
      emulated::freeLast();
    }
  }
  return 0;
}
