// Verify mode: replays are compared with what the forward computed.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>

#include "ebb/export.h"

namespace ebb {

// Whether replays are compared, bit for bit, with what the forward computed. Slow; for finding
// programs that write to memory behind torch's back, and operators that give other results when
// they are run again.
enum class VerifyMode : uint8_t {
  Off,     // not compared
  Raise,   // a difference throws ReplayMismatch
  Demote,  // a difference warns; the right bytes are used, and the op is saved from then on
};

// Sets the mode of regions that are entered from now on, in the whole process, and gives the one
// before. The first is that of the environment variable EBB_VERIFY: 0, 1 or demote.
EBB_API VerifyMode setVerifyMode(VerifyMode mode);

// Thrown by backward in verify mode. In Python it is ebb.ReplayMismatch.
class EBB_API ReplayMismatch : public c10::Error {
 public:
  using Error::Error;
};

}  // namespace ebb
