// The autocast state that a kernel saw, so that a replay shows it the same.
#pragma once

#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <utility>
#include <vector>

namespace ebb {

// Note [Autocast reaches some kernels]
// Ops that autocast knows run with it excluded. Kernels of the others still see it, and the ops
// they call are cast. A replay outside autocast would then compute in another precision.
struct AutocastState {
  c10::DispatchKeySet active;  // autocast keys that were not excluded
  std::vector<std::pair<c10::DeviceType, c10::ScalarType>> dtypes;  // per enabled device type
};

// The state on this thread; null if autocast is off or already handled. Shares `previous` if equal.
std::shared_ptr<const AutocastState> currentAutocastState(
    const std::shared_ptr<const AutocastState>& previous);

// Runs kernels as the forward did: below autograd, dispatch modes, functorch and interception, and
// with the recorded autocast state rather than the one of the thread that runs backward.
class ReplayDispatchGuard {
 public:
  explicit ReplayDispatchGuard(const AutocastState* autocast);
  ~ReplayDispatchGuard();
  ReplayDispatchGuard(const ReplayDispatchGuard&) = delete;
  ReplayDispatchGuard& operator=(const ReplayDispatchGuard&) = delete;

 private:
  c10::impl::PODLocalDispatchKeySet saved_;                               // the thread's own sets
  std::vector<std::pair<c10::DeviceType, c10::ScalarType>> savedDtypes_;  // its autocast dtypes
};

}  // namespace ebb
