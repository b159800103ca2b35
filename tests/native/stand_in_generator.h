// A generator that stands in for a device's, so that replays of draws can be tried without one.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>

namespace ebb {

struct ReplayedDraw {
  uint64_t forward = 0;   // where the generator stood at the draw
  uint64_t replayed = 0;  // ... and at the replay of that draw
  uint64_t before = 0;    // where it stood before the replay
  uint64_t after = 0;     // ... and after it
  uint64_t begunAnew =
      0;  // how often the replay has made it begin anew, as recurrent layers see it
};

struct ReplayCircumstances {
  bool takesGenerator = false;  // the op that is replayed has a Generator argument
  bool kernelRaises = false;
  bool settingFails = false;      // from the kernel on, whatever sets a generator's state raises
  std::function<void()> between;  // called between the draw and its replay; may be empty
};

// An op draws from the generator that is shared by all on `device`, others do, and it is replayed.
// Raises what the replay raises, or that a replay would be refused. CUDA's generator can be lent a
// state; others are only set.
ReplayedDraw replayDraw(c10::Device device, const ReplayCircumstances& circumstances);

}  // namespace ebb
