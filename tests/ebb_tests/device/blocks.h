// Blocks of memory, on a device or pinned on the host: who used them when, and where their bytes
// are.
//
// A device's memory has two addresses. The one that tensors have may not be touched by the host;
// kernels see the same bytes at another. So what reads a device's memory from the host, as on
// hardware, fails at once.
#pragma once

#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "clocks.h"

namespace late {

constexpr size_t kArena = size_t{64} << 30;  // bytes of addresses, taken one after the other

struct Arena {
  Arena() {
    const int file = memfd_create("late", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kArena) == 0, "late: no memory");
    const auto map = [&](int access) {
      void* at = mmap(nullptr, kArena, access, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(at != MAP_FAILED, "late: no address space");
      return static_cast<char*>(at);
    };
    told = map(PROT_NONE);
    kernels = map(PROT_READ | PROT_WRITE);
  }
  char* told;     // what tensors have
  char* kernels;  // the same bytes
  size_t next = 0;
};

inline Arena& arena() {
  static auto* instance = new Arena;
  return *instance;
}

inline bool isOnDevice(const void* address) {
  const auto* at = static_cast<const char*>(address);
  return at >= arena().told && at < arena().told + kArena;
}

// Where kernels find what is at `address`.
inline void* seen(const void* address) {
  return isOnDevice(address) ? arena().kernels + (static_cast<const char*>(address) - arena().told)
                             : const_cast<void*>(address);
}

struct Block {
  size_t size = 0;
  int stream = kHost;       // it was allocated on; kHost: pinned
  uint64_t pool = 0;        // of which graph it is; 0: of none
  uint64_t generation = 0;  // counts its allocations
  bool isFree = false;
  Accesses accesses;
  std::set<int> recordedOn;  // other streams, by record_stream
};

inline std::map<uintptr_t, Block> blocks;  // by address

// Null for memory that is nobody's here.
inline std::pair<const uintptr_t, Block>* blockAt(const void* address) {
  const auto number = reinterpret_cast<uintptr_t>(address);
  auto at = blocks.upper_bound(number);
  if (at == blocks.begin()) {
    return nullptr;
  }
  --at;
  return number < at->first + at->second.size ? &*at : nullptr;
}

struct Use {
  const void* address;
  bool writes;
};
using Uses = std::vector<Use>;

// `access` uses these, and comes after `clock`.
inline void note(const Uses& uses, const Access& access, const Clock& clock) {
  for (const Use& use : uses) {
    if (auto* found = blockAt(use.address)) {
      if (found->second.isFree) {
        tellRace("use of freed memory", Access{kHost, 0, "free"}, access);
      }
      found->second.accesses.add(access, use.writes, clock);
    }
  }
}

// The host uses it now.
inline void hostUses(const void* address, bool writes, const char* what) {
  const Lock lock(program);
  note({{address, writes}}, Access{kHost, 0, what}, hostClock);
}

}  // namespace late
