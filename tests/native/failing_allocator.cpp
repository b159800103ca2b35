#include "failing_allocator.h"

#include <atomic>

#include "allocator/in_use.h"
#include "allocator/shortage.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

AllocationFaults current;
std::atomic<uint64_t> seen{0};
std::atomic<uint64_t> failed{0};

bool isDrawn() {
  uint64_t drawn = (current.seed << 32) + ++seen;
  drawn = (drawn ^ drawn >> 31) * 0x9E3779B97F4A7C15U;
  drawn = (drawn ^ drawn >> 29) * 0xBF58476D1CE4E5B9U;
  return (drawn >> 32) % current.every == 0;
}

bool fails(size_t nbytes) {
  const bool isHere =
      current.isAnywhere || c10::impl::tls_is_dispatch_key_excluded(kInterceptionKey);
  const bool isOne = isHere && nbytes >= current.least && nbytes <= current.most && isDrawn();
  failed += isOne ? 1 : 0;
  if (isOne && current.onlyAsks) {
    giveBackMemory(c10::kCPU);
    return false;
  }
  return isOne;
}

}  // namespace

void failAllocations(const AllocationFaults& faults) {
  useCountingAllocator();
  failsHostAllocation.store(nullptr);
  current = faults;
  seen.store(0);
  failed.store(0);
  failsHostAllocation.store(faults.every == 0 ? nullptr : &fails);
}

uint64_t failedAllocations() { return failed.load(); }

}  // namespace ebb
