#include "hooks/call_guard.h"

#include <array>

namespace ebb {
namespace {

// Filled while libraries are loaded, so the list needs no lock.
constinit std::array<CallGuard*, 2> guards{};

}  // namespace

const SlotNumber ResultFingerprint::kSlot = takeSlot();

bool registerGuard(Guarded kind, CallGuard& guard) {
  guards[static_cast<size_t>(kind)] = &guard;
  return true;
}

CallGuard* guardOf(Guarded kind) { return guards[static_cast<size_t>(kind)]; }

}  // namespace ebb
