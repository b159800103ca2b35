#include "ahead_threads.h"

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <latch>
#include <map>
#include <optional>
#include <string>
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

std::atomic<bool> isHeld{false};     // the lock of hands
std::atomic<bool> hasPassed{false};  // a thread that should have waited for it

// Called with the lock of hands. Returns 1 if a thread passes meanwhile, as it would at once.
size_t holdHands(const c10::Storage&) {
  isHeld = true;
  isHeld.notify_all();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
  return hasPassed ? 1 : 0;
}

// Runs a function while another thread has the lock of hands.
using WhileHeld = std::function<void(const std::function<void()>&)>;

// True if an operation waits for the lock that another thread holds. `program` passes the operation
// to its argument.
bool waitsForHands(const std::function<void(const WhileHeld&)>& program) {
  isHeld = hasPassed = false;
  std::latch isReady{1};
  std::thread other([&] {
    program([&](const std::function<void()>& operation) {
      isReady.count_down();
      isHeld.wait(false);
      operation();
      hasPassed = true;
    });
  });
  isReady.wait();
  const bool waits = weakReferencesOfOthers(someBytes(), &holdHands) == 0;
  other.join();
  return waits;
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

std::vector<std::string> handsWithoutLock() {
  const c10::Storage storage = someBytes();
  const std::map<std::string, std::function<void(const WhileHeld&)>> programs{
      {"a recipe begins",
       [](const WhileHeld& whileHeld) {
         std::optional<AheadRecipeScope> scope;
         whileHeld([&] { scope.emplace(); });
       }},
      {"a recipe ends",
       [](const WhileHeld& whileHeld) {
         std::optional<AheadRecipeScope> scope(std::in_place);
         whileHeld([&] { scope.reset(); });
       }},
      {"a recipe reads",
       [&](const WhileHeld& whileHeld) {
         AheadRecipeScope scope;
         whileHeld([&] { scope.mayRead({storage}, 1); });
       }},
      {"a recipe changes the state",
       [](const WhileHeld& whileHeld) {
         const AheadRecipeScope scope;
         whileHeld([] { const ProcessStateChange change; });
       }},
      {"a hand is taken",
       [&](const WhileHeld& whileHeld) { whileHeld([&] { excludeFromAhead(storage, 1); }); }}};
  std::vector<std::string> found;
  for (const auto& [what, program] : programs) {
    if (!waitsForHands(program)) {
      found.push_back(what);
    }
  }
  return found;
}

}  // namespace ebb
