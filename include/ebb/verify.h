// Verify mode: compares replays with the results of the forward.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>

#include "ebb/export.h"

namespace ebb {

// How replays are compared, bit for bit, with the results of the forward. Verify mode is slow; use
// it to find programs that write to memory without torch's knowledge, and operators whose replay
// differs.
enum class VerifyMode : uint8_t {
  Off,     // no comparison
  Raise,   // a difference throws ReplayMismatch
  Demote,  // a difference warns; the correct bytes are used; the op's outputs are saved from now on
};

// Sets the mode of all regions entered from now on, in the whole process. Returns the previous
// mode. The initial mode comes from the environment variable EBB_VERIFY: 0, 1 or demote.
EBB_API VerifyMode setVerifyMode(VerifyMode mode);

// Recomputed tensors that backward has read in verify mode, in this process.
struct VerifyCounts {
  uint64_t compared = 0;   // with the forward's bytes
  uint64_t differing = 0;  // of these
};
EBB_API VerifyCounts verifyCounts();

// Thrown by backward in verify mode; ebb.ReplayMismatch in Python.
class EBB_API ReplayMismatch : public c10::Error {
 public:
  using Error::Error;
};

}  // namespace ebb
