// Convolutions on a device whose kernel depends on more than their arguments.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "ebb/export.h"

namespace ebb {

// Note [Kernels chosen by timing]
// With torch.backends.cudnn.benchmark on, cuDNN (and MIOpen) runs several algorithms for a
// convolution the first time that a thread meets its shape, and from then on that thread takes the
// one which was fastest. A replay runs on another thread, autograd's, which would measure anew, and
// may end with other last bits. So such results are kept, unless a rule says force.

// Note [Kernels chosen by free memory]
// cuDNN's engines for a convolution need workspaces of different sizes. Where the device has no
// memory for a workspace, torch raises nothing: it takes the next engine, and the thread uses that
// one for the shape from then on. So a replay near the peak may have other last bits than the
// forward had. The allocator counts allocations that fail. If the count moves while a convolution
// runs,
// 1. in a region: its result is kept. So are those of all later convolutions, since this thread
//    would now choose otherwise than another one.
// 2. in a replay: the replay raises, and so do later replays of convolutions on this thread.
//    Convolutions that are recorded later are kept.
// The count is the device's: an allocation that fails on another thread meanwhile may keep or
// refuse a convolution without need. Convolutions outside of regions are not watched.

// The reason why convolutions on a device must be kept now; null if they need not be.
const char* convolutionsAreKept();

// Watches for failed allocations while a convolution's kernel runs.
class WorkspaceWatch {
 public:
  explicit WorkspaceWatch(c10::Device device);

  // Whether an allocation on the device has failed since. If so convolutions are kept from now on.
  bool sawFailure() const;

 private:
  int64_t count() const;

  c10::Device device_;
  int64_t before_;
};

// True if a replay on this thread has met a failed allocation of a workspace.
bool choosesOtherwise();

// Notes that a replay on this thread has met one.
void chooseOtherwise();

// For tests: as if nothing had failed, on this thread and for later convolutions.
EBB_API void forgetFailedWorkspaces();

}  // namespace ebb
