// The page pools of all devices.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "ebb/paging.h"
#include "memory/dropping_mutex.h"
#include "paging/lane.h"
#include "paging/log.h"
#include "paging/tracked_pool.h"

namespace ebb {

// Note [How pools are sized]
// In a step that is recorded, live rows are copied to memory of exactly their size, for which the
// host must know their number and waits for it. When the step is over the most that was in use at a
// time is known, pools are made for it with some room to spare, and the host waits no more. If
// there was not enough room in a step its gradients are of no use, and the next step is recorded
// again.
class PoolSet {
 public:
  // `mutex` is the lock under which everything here is called.
  explicit PoolSet(DroppingMutex& mutex) : mutex_(mutex) {
  }

  // Throws c10::NotImplementedError if pages cannot be moved there: before anything depends on it.
  PageLane& laneOf(c10::Device device);

  // The compute streams wait for what they have given to lanes.
  void joinLanes();

  // Whether a compute stream is being captured as a part of a CUDA graph.
  bool isCapturing();

  // Null: the recorded step had none of this kind.
  TrackedPoolPtr find(const PoolKey& key) const;

  // Makes pools for `needs` in the place of those that there are; without a second tier if there is
  // no pinned memory for it. If there is no memory it warns; then there are none. Whether there
  // are. Throws c10::ValueError if the settings allow too little for one tensor.
  bool make(PageNeeds needs, const PagingSettings& settings);

  // Gives them up; gives what errors they had. A CUDA graph that was captured goes on using its
  // pools, so those stay.
  int64_t drop();

  // Drops those too, and all that is known.
  void clear();

  // Error bits. Waits until pools have done what they were given, and what those that a CUDA graph
  // has may have been given by the compute stream; while one is captured nobody may wait: 0. Counts
  // a step in which rows went to the second tier.
  int64_t readErrors();

  // Pools that were found used up are larger when they are made next.
  void growUsedUp();

  // Nothing is in them any more: the compute streams wait for what is left, and errors are on their
  // way to the host.
  void settle();

  // Adds errors that pools on its device have had, to a tensor of one int64.
  void addErrors(at::Tensor& errors);

  void addTo(PagingStats& stats) const;

 private:
  PagePoolOptions sizeOf(
      const PoolKey& key, const PageNeed& need, const PagingSettings& settings) const;
  void forEach(const std::function<void(TrackedPool&)>& visit);
  void startReading(const std::function<bool(const TrackedPool&)>& which);

  DroppingMutex& mutex_;
  std::map<c10::DeviceIndex, PageLane> lanes_;  // of CUDA devices; -1: the CPU
  std::map<PoolKey, TrackedPoolPtr> pools_;     // in use
  std::vector<TrackedPoolPtr> retired_;         // not used any more, but a CUDA graph has them
  std::map<PoolKey, int64_t> grown_;            // rows that a pool must have, since it had too few;
                                                // it is no stack then: order may be the cause
  PageNeeds needs_;                             // of the step that was recorded last
  uint64_t spilledSteps_ = 0;                   // see PagingStats
};

}  // namespace ebb
