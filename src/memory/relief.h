// Allocations that fail, and who gives memory back then.
#pragma once

#include <cstdint>

#include "ebb/export.h"

namespace ebb {

// Note [Allocations that fail]
// Memory that is held and not needed at once is given back when an allocation fails: what is on its
// way to the host, then what regions keep though it can be made again. What failed is tried again
// after each that gave something, until it comes to its end or nobody has anything left; then the
// exception goes on as if nobody had caught it.
//
// Only what can be done again as if it had not begun is tried again:
// 1. an operator of a region: see Note [Operators that are tried again];
// 2. a replay that backward waits for, unless its kernel had a buffer of the value's own to write;
// 3. copies of ebb's: of a leaf before it is written, of what backward may write to, and what comes
//    back.
// Operators outside of regions, backward's own among them, nobody sees; and a replay that runs
// ahead just ends. Nothing of this costs anything before an allocation fails, but that arguments of
// some operators are held while they run.

// What there was too little of.
enum class Shortage : uint8_t { None, Host, Device };

// Who has something, in the order in which they are asked.
enum class Reserve : uint8_t { Leaving, Kept };

// Gives some memory of that kind back; false if there is none. It is called with locks held, a
// graph's lock among them, so it only tries to take another graph's.
using GiveBack = bool (*)(Shortage);

// From now on, for the whole process. Gives what was there; null: nothing.
EBB_API GiveBack setReserve(Reserve reserve, GiveBack giveBack);

// In a handler: what there was too little of, if an allocation has failed.
Shortage shortageNow();

// In a handler: whether what was caught is an allocation that failed, and memory has been given
// back since. Throws nothing.
EBB_API bool relieved();

// What relieved() was asked about has come to its end after all.
EBB_API void noteOvercome();

// So far, in the process.
struct ReliefCounts {
  uint64_t failures;  // allocations
  uint64_t overcome;  // operators, replays and copies that came to an end nevertheless
};
EBB_API ReliefCounts reliefCounts();

// Runs `f`, which may be run again, until no allocation in it fails or nobody gives memory back.
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
