// Which kernels torch takes for convolutions off the CPU, where that is not the arguments' alone to
// say.
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
// 2. in a replay: that is refused, and so are later replays of convolutions on this thread. Later
//    convolutions are kept.
// The count is the device's: an allocation that fails on another thread meanwhile may keep or
// refuse a convolution without need. Convolutions outside of regions are not watched.

// Why the result of a convolution must be kept now, off the CPU; null: it need not.
const char* convolutionsAreKept();

// Around a convolution's kernel.
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

// Whether a replay on this thread has met a failure.
bool choosesOtherwise();
// It has.
void chooseOtherwise();

// For tests: as if nothing had failed, on this thread and for later convolutions.
EBB_API void forgetFailedWorkspaces();

}  // namespace ebb
