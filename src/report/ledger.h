// Counters that ebb.stats() reads. Regions count without atomics and hand in when they end.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "ebb/export.h"
#include "report/live_counts.h"

namespace ebb {

// One region's counts, or a sum of them. Bytes count each storage once.
struct RegionCounters {
  uint64_t entered = 0;       // times the region was entered
  uint64_t opsSeen = 0;       // ops that reached ebb
  uint64_t opsRecorded = 0;   // ... for which a recipe was written
  uint64_t opsReplayed = 0;   // recipes run again
  uint64_t bytesSaved = 0;    // made in the region, packed by autograd, kept
  uint64_t bytesDropped = 0;  // made in the region, packed by autograd, not kept
  uint64_t bytesCopied = 0;   // copied before a write, because a recipe still needed them

  RegionCounters& operator+=(const RegionCounters& other);
};

struct Ledger {
  std::map<std::string, RegionCounters> regions;  // of the current step, by region name
  RegionCounters total;                           // their sum
  uint64_t step = 0;                              // steps begun since the start or the last reset
};

// Note [What a step is]
// A step begins when an outermost region is entered after a backward has used an earlier one, or
// when the counters are reset. So after a backward, and until the next forward, the ledger shows
// exactly the last forward and backward.
void ledgerRegionEntered();
void ledgerBackwardSeen();
void ledgerAdd(const std::string& region, const RegionCounters& counters);

EBB_API Ledger readLedger();
EBB_API void resetLedger();

}  // namespace ebb
