#include "emulator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "fibers.h"
#include "hooks.h"
#include "memory.h"
#include "order.h"

namespace emulated {

Here here;
Sizes sizes;
Scheduling scheduling;
std::string doing;

namespace {

std::mt19937_64 random_;

unsigned below(size_t limit) { return static_cast<unsigned>((random_() >> 32) * limit >> 32); }

struct Block {
  std::vector<unsigned> waiting;  // at a barrier
  unsigned running;               // threads that have not returned
  int line;                       // of the barrier
  std::map<int, void*> shared;    // by line
};

// The grid that runs. Threads have numbers, those of a block one after the other.
Memory memory;
Order order;
unsigned current = 0;  // the thread that runs
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Block> gridBlocks;
std::vector<unsigned> late;   // blocks that have not started
std::vector<unsigned> ready;  // threads that can go on
bool isRunning = false;
void (*gridBody)(void*) = nullptr;
void* gridArguments = nullptr;
size_t gridArgumentBytes = 0;

void releaseIfAllWait(Block& block) {
  if (!block.waiting.empty() && block.waiting.size() == block.running) {
    order.barrier(block.waiting);
    ready.insert(ready.end(), block.waiting.begin(), block.waiting.end());
    block.waiting.clear();
  }
}

// A thread that returns counts as one that waits at every barrier.
void runThread() {
  gridBody(gridArguments);
  Block& block = gridBlocks[here.block.x];
  --block.running;
  releaseIfAllWait(block);
}

// As many as a device has room for; which of the others is next is any.
void startBlocks() {
  const auto runs = [](const Block& block) { return block.running > 0; };
  auto running = std::count_if(gridBlocks.begin(), gridBlocks.end(), runs);
  for (; !late.empty() && running < scheduling.residentBlocks; ++running) {
    gridBlocks[late.back()].running = here.threads.x;
    for (unsigned thread = 0; thread < here.threads.x; ++thread) {
      ready.push_back(late.back() * here.threads.x + thread);
    }
    late.pop_back();
  }
}

void resume(unsigned place) {
  current = ready[place];
  ready[place] = ready.back();
  ready.pop_back();
  here.block.x = current / here.threads.x;
  here.thread.x = current % here.threads.x;
  fibers[current]->resume();
}

void maybeGiveWay(unsigned likely) {
  if (below(1024) < likely) {
    ready.push_back(current);
    fibers[current]->giveWay();
  }
}

// The grid's arguments, and what stands for registers and constants.
bool maybeReads(const void* address) {
  const auto isIn = [&](const void* begin, size_t bytes) {
    const auto* at = static_cast<const char*>(address);
    return at >= begin && at < static_cast<const char*>(begin) + bytes;
  };
  return isIn(gridArguments, gridArgumentBytes) || isIn(&here, sizeof here) ||
         isIn(&sizes, sizeof sizes);
}

void access(const void* address, size_t bytes, Access kind) {
  if (memory.has(address)) {
    memory.access(address, bytes, kind, current, order);
  } else if (!fibers[current]->owns(address) && !(kind == Access::Read && maybeReads(address))) {
    fail("out of bounds: a thread touches memory that is not the device's");
  }
}

}  // namespace

void seed(uint64_t value) { random_.seed(value); }

void* allocate(size_t bytes, size_t misaligned, const std::string& name) {
  return memory.allocate(bytes, misaligned, name);
}

void freeLast() { memory.freeLast(); }

void fail(const std::string& words) {
  std::printf("%s: %s\n", doing.c_str(), words.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

void runGrid(
    unsigned blocks, unsigned threads, void (*body)(void*), void* arguments, size_t argumentBytes) {
  if (blocks * threads > kMostThreads || blocks * threads == 0) {
    fail("a grid of " + std::to_string(blocks * threads) + " threads");
  }
  while (fibers.size() < blocks * threads) {
    fibers.push_back(std::make_unique<Fiber>(&runThread));
  }
  gridBody = body;
  gridArguments = arguments;
  gridArgumentBytes = argumentBytes;
  here.threads.x = threads;
  here.blocks.x = blocks;
  gridBlocks.assign(blocks, {{}, 0, 0, {}});
  late.resize(blocks);
  std::iota(late.begin(), late.end(), 0U);
  std::shuffle(late.begin(), late.end(), random_);
  order.begin(blocks * threads);
  memory.forget();
  isRunning = true;
  for (startBlocks(); !ready.empty(); startBlocks()) {
    resume(below(ready.size()));
  }
  isRunning = false;
  memory.freeShared();
}

void synchroniseBlock(int line) {
  Block& block = gridBlocks[here.block.x];
  if (!block.waiting.empty() && block.line != line) {
    fail(
        "barrier: threads of a block wait in line " + std::to_string(block.line) + " and in line " +
        std::to_string(line));
  }
  block.line = line;
  block.waiting.push_back(current);
  releaseIfAllWait(block);
  fibers[current]->giveWay();
}

void* sharedMemory(size_t bytes, int line) {
  void*& memoryOf = gridBlocks[here.block.x].shared[line];
  if (memoryOf == nullptr) {
    memoryOf = memory.allocateShared(bytes, here.block.x);
  }
  return memoryOf;
}

void fence() {
  maybeGiveWay(scheduling.atSynchronisation);
  order.fence(current);
  maybeGiveWay(scheduling.atSynchronisation);
}

unsigned increment(unsigned* address, unsigned limit) {
  maybeGiveWay(scheduling.atSynchronisation);
  access(address, sizeof *address, Access::Atomic);
  order.atomic(current, address);
  const unsigned old = *address;
  *address = old >= limit ? 0 : old + 1;
  maybeGiveWay(scheduling.atSynchronisation);
  return old;
}

void accessed(const void* address, size_t bytes, size_t alignment, bool writes) {
  if (!isRunning) {
    return;
  }
  if (reinterpret_cast<uintptr_t>(address) % alignment != 0) {
    fail("misaligned: an access to " + std::to_string(bytes) + " bytes");
  }
  maybeGiveWay(scheduling.atAccesses);
  access(address, bytes, writes ? Access::Write : Access::Read);
}

}  // namespace emulated
