// What a test chooses. Changed only while no stream has anything to do.
#pragma once

#include <cstddef>
#include <cstdint>

namespace late {

// Whose numbers a random operator draws.
enum class Draws : int64_t { FromDevice, FromCpu, FromBoth, FromHidden };

struct Settings {
  bool lazy = true;               // nothing runs until somebody waits for it
  int64_t computeUs = 0;          // else each task waits first, at random up to so long: ...
  int64_t sideUs = 1000;          // ... on default streams, and on all others
  size_t limit = SIZE_MAX;        // bytes of device memory in use
  bool (*whenShort)() = nullptr;  // frees memory, as a callback of CUDA's allocator
  size_t others = 0;              // bytes of device memory that other processes have
  size_t hostLimit = SIZE_MAX;    // bytes of pinned memory in use
  int64_t dropWait = -1;          // which wait is left out, counted from 0
  int64_t callsLeft = INT64_MAX;  // then every call fails, as after a device's assert
  int captureError = -1;          // what asking whether a stream is captured raises; 0: no number
  Draws draws = Draws::FromDevice;
  bool hasGenerator = true;
  bool countsBytes = true;  // the allocator has statistics; else asking for them raises
  bool isUnsteady = false;  // what kernels add in any order differs from call to call
  int64_t failPages = -1;   // which call of a page mover fails, counted from 0
};
inline Settings settings;

}  // namespace late
