// Convolutions whose kernel depends on more than the arguments.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

#include "ebb/export.h"

namespace ebb {

// Note [Kernels chosen by timing]
// With torch.backends.cudnn.benchmark on, cuDNN (and MIOpen) runs several algorithms for a
// convolution the first time that a thread meets the shape. From then on the thread uses the
// fastest algorithm. A replay runs on autograd's thread, which would time the algorithms again and
// may choose another one, with other last bits. So the results of such convolutions are kept,
// unless a rule says force.

// Note [Kernels chosen by free memory]
// cuDNN's engines for a convolution need workspaces of different sizes. If the device has no memory
// for a workspace, torch raises nothing. Instead torch takes the next engine, and the thread uses
// that engine for the shape from then on. So a replay near the peak may give other last bits than
// the forward. The allocator counts failed allocations. If the count grows while a convolution
// runs,
// 1. in a region: the convolution's result is kept. So are the results of all later convolutions,
//    since this thread would now choose another engine than other threads.
// 2. in a replay: the replay raises, and so do later replays of convolutions on this thread. The
//    results of convolutions that are recorded later are kept.
// The count is per device. So after a failed allocation on another thread at the same time, ebb may
// keep a result, or a replay may raise, without need. Convolutions outside of regions are not
// watched.

// The reason why results of convolutions must be kept now; null if there is none.
const char* convolutionsAreKept();

// Watches for failed allocations while a convolution's kernel runs.
class WorkspaceWatch {
 public:
  explicit WorkspaceWatch(c10::Device device);

  // True if an allocation on the device has failed since this object was made. If so, the results
  // of all later convolutions are kept.
  bool sawFailure() const;

 private:
  int64_t count() const;

  c10::Device device_;
  int64_t before_;
};

// True if, in a replay on this thread, the allocation of a workspace has failed.
bool choosesOtherwise();

// Records a failed allocation of a workspace in a replay on this thread.
void chooseOtherwise();

// For tests: forgets all failed allocations of workspaces, in forwards and in replays.
EBB_API void forgetFailedWorkspaces();

}  // namespace ebb
