// Which accesses of a grid's threads come before which, by what CUDA promises.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator.h"

namespace emulated {

// Note [Order of accesses]
// Each thread has a clock: for each thread, up to which of its moments all that it did comes before
// what this thread does next. CUDA promises order by three things, and these are as weak here as
// PTX's memory model has them:
//  1. A barrier: what a block's threads did before it comes before what they do after it.
//  2. A fence and then an atomic operation of the same thread, read by an atomic operation and then
//     a fence of another thread: what comes before the first fence comes before all that follows
//     the second. Without either fence nothing is promised.
//  3. Launches come one after the other.
class Clock {
 public:
  void join(const Clock& other);
  uint32_t& operator[](unsigned thread) { return of_[thread]; }
  uint32_t operator[](unsigned thread) const { return of_[thread]; }

 private:
  std::array<uint32_t, kMostThreads> of_{};
};

// Of one grid.
class Order {
 public:
  void begin(unsigned threads);

  void fence(unsigned thread);
  void atomic(unsigned thread, const void* address);
  void barrier(const std::vector<unsigned>& threads);

  uint32_t now(unsigned thread) const { return of_[thread].seen[thread]; }
  const Clock& seen(unsigned thread) const { return of_[thread].seen; }

 private:
  struct Thread {
    Clock seen;      // what comes before its next access
    Clock fenced;    // of that, what came before its last fence: what its atomics tell
    Clock observed;  // what its atomics were told, in force after its next fence
  };
  struct Told {
    const void* address;
    Clock clock;
  };

  std::vector<Thread> of_;
  std::vector<Told> told_;  // by atomics, to the next at that address
};

}  // namespace emulated
