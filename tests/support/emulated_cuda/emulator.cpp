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

unsigned below(size_t limit) {
  return static_cast<unsigned>((random_() >> 32) * limit >> 32);
}

struct Block {
  std::vector<unsigned> waiting;  // at a barrier
  unsigned running;               // threads that have not returned
  int line;                       // of the barrier
  std::map<int, void*> shared;    // by line
};

// Threads have numbers, those of a block one after the other.
class Grid {
 public:
  void run(
      unsigned blocks,
      unsigned threads,
      void (*body)(void*),
      void* arguments,
      size_t argumentBytes);

  bool isRunning() const {
    return isRunning_;
  }
  void access(const void* address, size_t bytes, Access kind);
  void maybeGiveWay(unsigned likely);
  void synchroniseBlock(int line);
  void* sharedMemory(size_t bytes, int line);

  Memory memory;
  Order order;
  unsigned current = 0;  // the thread that runs

 private:
  static void runThread();
  void startBlocks();
  void resume(unsigned place);
  void threadReturns();
  void releaseIfAllWait(Block& block);
  bool maybeReads(const void* address) const;

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Block> blocks_;
  std::vector<unsigned> late_;   // blocks that have not started
  std::vector<unsigned> ready_;  // threads that can go on
  bool isRunning_ = false;
  void (*body_)(void*) = nullptr;
  void* arguments_ = nullptr;
  size_t argumentBytes_ = 0;
};

Grid grid;

void Grid::run(
    unsigned blocks, unsigned threads, void (*body)(void*), void* arguments, size_t argumentBytes) {
  if (blocks * threads > kMostThreads || blocks * threads == 0) {
    fail("a grid of " + std::to_string(blocks * threads) + " threads");
  }
  while (fibers_.size() < blocks * threads) {
    fibers_.push_back(std::make_unique<Fiber>(&Grid::runThread));
  }
  body_ = body;
  arguments_ = arguments;
  argumentBytes_ = argumentBytes;
  here.threads.x = threads;
  here.blocks.x = blocks;
  blocks_.assign(blocks, {{}, 0, 0, {}});
  late_.resize(blocks);
  std::iota(late_.begin(), late_.end(), 0U);
  std::shuffle(late_.begin(), late_.end(), random_);
  order.begin(blocks * threads);
  memory.forget();
  isRunning_ = true;
  for (startBlocks(); !ready_.empty(); startBlocks()) {
    resume(below(ready_.size()));
  }
  isRunning_ = false;
  memory.freeShared();
}

// As many as a device has room for; which of the others is next is any.
void Grid::startBlocks() {
  const auto runs = [](const Block& block) { return block.running > 0; };
  auto running = std::count_if(blocks_.begin(), blocks_.end(), runs);
  for (; !late_.empty() && running < scheduling.residentBlocks; ++running) {
    blocks_[late_.back()].running = here.threads.x;
    for (unsigned thread = 0; thread < here.threads.x; ++thread) {
      ready_.push_back(late_.back() * here.threads.x + thread);
    }
    late_.pop_back();
  }
}

void Grid::resume(unsigned place) {
  current = ready_[place];
  ready_[place] = ready_.back();
  ready_.pop_back();
  here.block.x = current / here.threads.x;
  here.thread.x = current % here.threads.x;
  fibers_[current]->resume();
}

void Grid::runThread() {
  grid.body_(grid.arguments_);
  grid.threadReturns();
}

// It counts as one that waits at every barrier.
void Grid::threadReturns() {
  Block& block = blocks_[here.block.x];
  --block.running;
  releaseIfAllWait(block);
}

void Grid::maybeGiveWay(unsigned likely) {
  if (below(1024) < likely) {
    ready_.push_back(current);
    fibers_[current]->giveWay();
  }
}

void Grid::synchroniseBlock(int line) {
  Block& block = blocks_[here.block.x];
  if (!block.waiting.empty() && block.line != line) {
    fail(
        "barrier: threads of a block wait in line " + std::to_string(block.line) + " and in line " +
        std::to_string(line));
  }
  block.line = line;
  block.waiting.push_back(current);
  releaseIfAllWait(block);
  fibers_[current]->giveWay();
}

void Grid::releaseIfAllWait(Block& block) {
  if (!block.waiting.empty() && block.waiting.size() == block.running) {
    order.barrier(block.waiting);
    ready_.insert(ready_.end(), block.waiting.begin(), block.waiting.end());
    block.waiting.clear();
  }
}

void* Grid::sharedMemory(size_t bytes, int line) {
  void*& memoryOf = blocks_[here.block.x].shared[line];
  if (memoryOf == nullptr) {
    memoryOf = memory.allocateShared(bytes, here.block.x);
  }
  return memoryOf;
}

void Grid::access(const void* address, size_t bytes, Access kind) {
  if (memory.has(address)) {
    memory.access(address, bytes, kind, current, order);
  } else if (!fibers_[current]->owns(address) && !(kind == Access::Read && maybeReads(address))) {
    fail("out of bounds: a thread touches memory that is not the device's");
  }
}

// The grid's arguments, and what stands for registers and constants.
bool Grid::maybeReads(const void* address) const {
  const auto isIn = [&](const void* begin, size_t bytes) {
    const auto* at = static_cast<const char*>(address);
    return at >= begin && at < static_cast<const char*>(begin) + bytes;
  };
  return isIn(arguments_, argumentBytes_) || isIn(&here, sizeof here) || isIn(&sizes, sizeof sizes);
}

}  // namespace

void seed(uint64_t value) {
  random_.seed(value);
}

void* allocate(size_t bytes, size_t misaligned, const std::string& name) {
  return grid.memory.allocate(bytes, misaligned, name);
}

void freeLast() {
  grid.memory.freeLast();
}

void fail(const std::string& words) {
  std::printf("%s: %s\n", doing.c_str(), words.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

void runGrid(
    unsigned blocks, unsigned threads, void (*body)(void*), void* arguments, size_t argumentBytes) {
  grid.run(blocks, threads, body, arguments, argumentBytes);
}

void synchroniseBlock(int line) {
  grid.synchroniseBlock(line);
}

void* sharedMemory(size_t bytes, int line) {
  return grid.sharedMemory(bytes, line);
}

void fence() {
  grid.maybeGiveWay(scheduling.atSynchronisation);
  grid.order.fence(grid.current);
  grid.maybeGiveWay(scheduling.atSynchronisation);
}

unsigned increment(unsigned* address, unsigned limit) {
  grid.maybeGiveWay(scheduling.atSynchronisation);
  grid.access(address, sizeof *address, Access::Atomic);
  grid.order.atomic(grid.current, address);
  const unsigned old = *address;
  *address = old >= limit ? 0 : old + 1;
  grid.maybeGiveWay(scheduling.atSynchronisation);
  return old;
}

void accessed(const void* address, size_t bytes, size_t alignment, bool writes) {
  if (!grid.isRunning()) {
    return;
  }
  if (reinterpret_cast<uintptr_t>(address) % alignment != 0) {
    fail("misaligned: an access to " + std::to_string(bytes) + " bytes");
  }
  grid.maybeGiveWay(scheduling.atAccesses);
  grid.access(address, bytes, writes ? Access::Write : Access::Read);
}

}  // namespace emulated
