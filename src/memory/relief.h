// Failed allocations, and the parts of ebb that free memory then.
#pragma once

#include <cstdint>

#include "ebb/export.h"

namespace ebb {

// Note [Allocations that fail]
// When an allocation fails, ebb frees memory that it holds but does not need at once: first values
// on their way to the host, then recomputable values that regions keep. The failed work is tried
// again after each step that freed memory, until the work ends or nothing is left to free. Then the
// exception propagates as if ebb had not caught it.
//
// Only work that can be repeated as if it had not begun is tried again:
// 1. an operator of a region: see Note [Operators that are tried again];
// 2. a replay that backward waits for, unless the kernel may have begun to write in place to the
//    only copy of a value;
// 3. ebb's own copies: of a leaf before a write, of bytes that backward may write to, and of values
//    that come back from the host.
// ebb does not see operators outside of regions, such as backward's own. If an allocation fails in
// a replay ahead, that replay ends. While ebb has memory to free, there are two costs even if no
// allocation fails: ebb holds the arguments of some operators while they run, and copies small
// buffers that those operators write to.

// The kind of memory that ran out.
enum class Shortage : uint8_t { None, Host, Device };

// The parts of ebb with memory to free, in the order in which ebb asks them: values on their way to
// the host, and recomputable values that regions keep.
enum class Reserve : uint8_t { Leaving, Recomputable };

// Frees some memory of the given kind; returns false if there is none. The caller may hold a
// graph's lock and others. So the function must not wait for another graph's lock; it may only try
// the lock.
using GiveBack = bool (*)(Shortage);

// Sets the function of `reserve` for the whole process; null: none. Returns the previous function.
EBB_API GiveBack setReserve(Reserve reserve, GiveBack giveBack);

// Called in a catch block: the kind of memory that ran out; None if no allocation failed.
Shortage shortageNow();

// Called in a catch block. If the exception is a failed allocation, frees memory. Returns true if
// memory was freed. Does not throw.
EBB_API bool relieved();

// Counts an operator, replay or copy that failed, ran again because relieved() returned true, and
// has now succeeded.
EBB_API void noteOvercome();

// Totals of the process.
struct ReliefCounts {
  uint64_t failures;  // failed allocations
  uint64_t overcome;  // operators, replays and copies that succeeded after a failure
};
EBB_API ReliefCounts reliefCounts();

// Runs `f`. If an allocation in `f` fails, frees memory and runs `f` again, until no allocation
// fails or no memory is left to free. `f` must be repeatable.
template <class F>
auto withRelief(F&& f) {
  bool failed = false;
  for (;;) {
    try {
      auto result = f();
      if (failed) {
        noteOvercome();
      }
      return result;
    } catch (...) {
      if (!relieved()) {
        throw;
      }
    }
    failed = true;
  }
}

}  // namespace ebb
