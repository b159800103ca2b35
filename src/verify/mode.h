// Whether replays are compared with what the forward computed, and what happens if they differ.
#pragma once

#include "ebb/verify.h"
#include "graph/witness.h"

namespace ebb {

// The mode of regions that are entered from now on: the last one set, else that of EBB_VERIFY.
EBB_API VerifyMode verifyMode();

// Throws ReplayMismatch or, in the mode Demote, warns and has the op saved from now on.
void reportMismatch(VerifyMode mode, const Mismatch& mismatch);

}  // namespace ebb
