// Runs CUDA kernels on the host: each thread of a grid is a fiber, and a random scheduler says
// which goes on.
//
// Note [Emulated kernels]
// Kernels are compiled with -fsanitize=thread, without its library: the compiler then calls a
// function before each access to memory, and hooks.cpp has those functions. So at each access
//  1. another thread may go on first,
//  2. the bytes must belong to a buffer, and be aligned as the type of the access is,
//  3. the access must be ordered with all others to these bytes, of which one writes, by what CUDA
//     promises: see Note [Order of accesses].
// A program that passes 3 in a schedule does not depend there on how a device reorders or delays
// accesses, so it is enough to run them one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>

namespace emulated {

struct Index {
  unsigned x;
};

// Which thread runs.
struct Here {
  Index thread, block, threads, blocks;
};
extern Here here;

// In place of constants of the same names in the source: a device's would be too many threads.
struct Sizes {
  int kThreads = 4;
  int kWarp = 2;
  int kPiece = 32;
  int kBlocksPerProcessor = 2;
  int kResetBlocks = 2;
  int processors = 2;  // of the device
};
extern Sizes sizes;

// How likely it is that another thread goes on, in 1024ths, and how many blocks run at a time.
struct Scheduling {
  unsigned atAccesses = 0;
  unsigned atSynchronisation = 512;
  unsigned residentBlocks = 4;
};
extern Scheduling scheduling;

constexpr unsigned kMostThreads = 64;  // of a grid

void seed(uint64_t value);

// Memory that kernels may touch; `misaligned` is its address modulo 256. What was allocated last is
// freed first.
void* allocate(size_t bytes, size_t misaligned, const std::string& name);
void freeLast();

// Ends the process. The words are said after those of `doing`, which is the caller's.
[[noreturn]] void fail(const std::string& words);
extern std::string doing;

// For kernels.
void synchroniseBlock(int line);
void fence();
unsigned increment(unsigned* address, unsigned limit);  // atomically, to `limit` and then to 0
void* sharedMemory(size_t bytes, int line);

template <class T>
T& shared(int line = __builtin_LINE()) {
  return *static_cast<T*>(sharedMemory(sizeof(T), line));
}

// Calls body(arguments) in each thread of a grid; kernels may read the arguments.
void runGrid(
    unsigned blocks, unsigned threads, void (*body)(void*), void* arguments, size_t argumentBytes);

template <class... Parameters, class... Arguments>
void launch(
    int64_t blocks, int64_t threads, size_t, void*, void (*kernel)(Parameters...),
    Arguments... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  };
  Call call{kernel, {arguments...}};
  const auto body = [](void* it) {
    std::apply(static_cast<Call*>(it)->kernel, static_cast<Call*>(it)->parameters);
  };
  runGrid(blocks, threads, body, &call, sizeof call);
}

}  // namespace emulated
