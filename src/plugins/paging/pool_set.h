// The page pools of all devices.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "ebb/paging.h"
#include "plugins/paging/lane.h"
#include "plugins/paging/log.h"
#include "plugins/paging/tracked_pool.h"
#include "stores/dropping_mutex.h"

namespace ebb {

// Note [How pools are sized]
// In a recorded step, valid rows are copied to memory of exactly their size, so the host waits for
// each count. When the step is over, the peak use is known. ebb makes pools for the peak plus
// headroom, and from then on the host does not wait. A step in which a pool overflowed has invalid
// gradients. ebb records the next step to size the pools anew.
class PoolSet {
 public:
  // `mutex` is the lock under which all methods are called.
  explicit PoolSet(DroppingMutex& mutex) : mutex_(mutex) {}

  // The lane of a device. The first call for a device tests if ebb can move pages there (but not in
  // a capture), and throws c10::NotImplementedError if not.
  PageLane& laneOf(c10::Device device);

  // On each device, the current compute stream waits for the calls given from that stream.
  void joinLanes();

  // True if a compute stream is being captured in a CUDA graph.
  bool isCapturing();

  // Null if the recorded step had no tensor of this kind.
  TrackedPoolPtr find(const PoolKey& key) const;

  // Replaces all pools by pools for `needs`. Without enough pinned memory the pools have no second
  // tier. Without enough device memory ebb warns and makes no pools. Returns whether there are
  // pools. Throws c10::ValueError if the settings allow too little for one tensor.
  bool make(PageNeeds needs, const PagingSettings& settings);

  // Drops the pools and returns their error bits. A captured CUDA graph continues to use its pools,
  // so those stay.
  int64_t drop();

  // Drops all pools, including those of graphs, and all other state.
  void clear();

  // Error bits of all pools. Waits until the pools have finished all calls, including those of a
  // CUDA graph launched on the compute stream. During a capture the host may not wait: returns 0.
  // Also counts the step if rows went to the second tier.
  int64_t readErrors();

  // Marks pools that overflowed, so that make() makes them larger.
  void growUsedUp();

  // Called when all pages are back. The compute streams wait for the remaining pool operations, and
  // the copy of the error bits to the host starts.
  void settle();

  // Sets in `errors`, a tensor of one int64, the error bits of all pools on its device.
  void addErrors(at::Tensor& errors);

  void addTo(PagingStats& stats) const;

 private:
  PagePoolOptions sizeOf(
      const PoolKey& key, const PageNeed& need, const PagingSettings& settings) const;
  void forEach(const std::function<void(TrackedPool&)>& visit);
  void startReading(const std::function<bool(const TrackedPool&)>& which);

  DroppingMutex& mutex_;
  std::map<c10::DeviceIndex, PageLane> lanes_;  // by CUDA device index; -1: the CPU
  std::map<PoolKey, TrackedPoolPtr> pools_;     // in use
  std::vector<TrackedPoolPtr> retired_;         // dropped, but used by a CUDA graph
  std::map<PoolKey, int64_t> grown_;            // least number of rows, for pools that overflowed.
                                                // Such pools are never stacks, since the order of
                                                // frees may have caused the overflow.
  PageNeeds needs_;                             // of the latest recorded step
  uint64_t spilledSteps_ = 0;                   // see PagingStats
};

}  // namespace ebb
