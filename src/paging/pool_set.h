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

  PageLane& laneOf(c10::Device device);

  // The compute streams wait for all that lanes have been given.
  void joinLanes();

  // Null: the recorded step had none of this kind.
  TrackedPoolPtr find(const PoolKey& key) const;

  // Makes pools for `needs` in the place of those that there are. Throws c10::ValueError if the
  // settings allow too little for one tensor, and c10::OutOfMemoryError; then there are none.
  void make(PageNeeds needs, const PagingSettings& settings);

  // Gives them up; gives what errors they had. A CUDA graph that was captured goes on using its
  // pools, so those stay.
  int64_t drop();

  // Drops those too, and all that is known.
  void clear();

  // Error bits. Waits for the pools, and counts a step in which rows went to the second tier.
  int64_t readErrors();

  // Pools that were found used up are larger when they are made next.
  void growUsedUp();

  // Nothing is in them any more.
  void settle();

  // Adds errors that pools on its device have had, to a tensor of one int64.
  void addErrors(at::Tensor& errors);

  void addTo(PagingStats& stats) const;

 private:
  PagePoolOptions sizeOf(
      const PoolKey& key, const PageNeed& need, const PagingSettings& settings) const;
  void forEach(const std::function<void(TrackedPool&)>& visit);

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
