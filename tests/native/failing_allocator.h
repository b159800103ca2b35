// Allocations of host memory that fail at random.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ebb {

struct AllocationFaults {
  uint32_t every = 0;       // one of so many fails, at random; 0: none
  uint64_t seed = 0;        // which ones
  size_t least = 0;         // of no fewer bytes than this
  size_t most = 0;          // and no more
  bool isAnywhere = false;  // false: only in kernels that ebb runs, and in copies of its own
  bool onlyAsks = false;    // ebb is asked for memory, and the allocation succeeds
};

void failAllocations(const AllocationFaults& faults);

// How many have failed since.
uint64_t failedAllocations();

}  // namespace ebb
