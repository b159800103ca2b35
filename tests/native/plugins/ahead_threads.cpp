#include "ahead_threads.h"

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "../many_threads.h"
#include "hooks/process_state.h"
#include "plugins/ahead/recipe_scope.h"
#include "torch_seams/owners.h"

namespace ebb {
namespace {

c10::Storage someBytes() {
  constexpr size_t kBytes = 8;
  return {c10::Storage::use_byte_size_t(), kBytes, c10::GetAllocator(c10::kCPU), true};
}

}  // namespace

bool handsAreKnown(size_t threads, size_t rounds) {
  constexpr uint64_t kClosed = 5;
  return allRounds(threads, rounds, [&](size_t, size_t) {
    const AheadRecipeScope scope;
    const c10::Storage free = someBytes();
    const c10::Storage inHand = someBytes();
    excludeFromAhead(inHand, kClosed);
    const bool freeMayBeRead = AheadRecipeScope().mayRead({free}, kClosed);
    const bool inHandMayBeRead = AheadRecipeScope().mayRead({free, inHand}, kClosed);
    const bool laterMayBeRead = AheadRecipeScope().mayRead({inHand}, kClosed + 1);
    return scope.holds() && freeMayBeRead && !inHandMayBeRead && laterMayBeRead &&
           weakReferencesOfOthers(inHand, &weakReferences) == 1;
  });
}

bool stillThreadsAreKnown(size_t rounds) {
  std::atomic<bool> isOver{false};
  std::thread others([&] {
    while (!isOver) {
      const std::array<AheadRecipeScope, 64> begun{};
    }
  });
  for (size_t i = 0; i < rounds; ++i) {
    const AheadRecipeScope scope;
    if (scope.holds()) {
      const ProcessStateChange ofItsOwn;
    }
  }
  isOver = true;
  others.join();
  return true;
}

bool handsAreCounted(size_t storages) {
  const c10::Storage inHand = someBytes();
  excludeFromAhead(inHand, 1);
  std::atomic<bool> isOver{false};
  std::thread other([&] {
    std::vector<c10::Storage> more(storages);
    for (c10::Storage& storage : more) {
      storage = someBytes();
      excludeFromAhead(storage, 1);
    }
    isOver = true;
  });
  bool right = true;
  while (!isOver) {
    right &= weakReferencesOfOthers(inHand, &weakReferences) == 1;
  }
  other.join();
  return right;
}

}  // namespace ebb
