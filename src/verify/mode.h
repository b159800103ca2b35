// The verify mode: compares replays with the forward, and handles differences.
#pragma once

#include "ebb/verify.h"
#include "graph/witness.h"

namespace ebb {

// The mode of regions entered from now on: the last mode set, else that of EBB_VERIFY.
EBB_API VerifyMode verifyMode();

// Throws ReplayMismatch. In the mode Demote, warns instead and saves the op's outputs from now on.
void reportMismatch(VerifyMode mode, const Mismatch& mismatch);

}  // namespace ebb
