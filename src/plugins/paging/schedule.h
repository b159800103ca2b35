// The order of a step's layers in forward and backward.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ebb/export.h"

namespace ebb {

// A position in a pipeline.
struct PipelinePlace {
  int32_t stage = 0;
  int32_t microbatch = -1;  // -1: PageSchedule counts
};

// Sets the place on this thread and returns the previous place.
EBB_API PipelinePlace exchangePipelinePlace(PipelinePlace place);

// The forward or backward of one layer on one micro-batch.
struct ScheduleEntry {
  std::string layer;       // the region's name
  int32_t stage = 0;       // pipeline stage
  int32_t microbatch = 0;  // from 0
  bool backward = false;

  ScheduleEntry reversed() const { return {layer, stage, microbatch, !backward}; }
  auto operator<=>(const ScheduleEntry&) const = default;

  // "forward of 'experts', stage 0, micro-batch 2"
  std::string describe() const;
};

// Note [Page schedules]
// A step with a fixed order (paging.step(), run_step(fixed_order=True)) is a list of entries.
// The first such step is recorded, and all later ones must run the same list. So ebb knows the next
// entry. A layer whose backward directly follows its forward is not paged. When the backward of one
// layer begins, ebb starts to restore the pages of the layer whose backward comes next. Other steps
// have no list. A step that the user has not begun begins with the first stash, and ends when no
// stash is left.
class PageSchedule {
 public:
  // Begins a step. The first step that ends is the recorded step.
  void begin();

  // Ends the step. Throws if some entries of the recorded step are missing. If all are missing,
  // nothing was paged, and nothing is thrown.
  void end();

  // Stops recording and comparing until the next begin().
  void abandon();

  // Adds the forward of a region at the thread's place in a pipeline.
  ScheduleEntry forward(const std::string& region);

  // Adds the backward of an entry from forward().
  void backward(const ScheduleEntry& forward);

  // True if the backward of `forward` comes next in the recorded step.
  bool isTurningPoint(const ScheduleEntry& forward) const;

  // The forward whose backward comes next; nothing if unknown.
  std::optional<ScheduleEntry> nextBackward() const;
  // True if the step's entries are compared with recorded ones.
  bool isFollowing() const { return following_ && isRecorded_; }

  // Restarts the count of micro-batches at 0.
  void restartCounts() { forwards_.clear(); }

  // True if there is a recorded step to compare with.
  bool isRecorded() const { return isRecorded_; }
  const std::vector<ScheduleEntry>& recorded() const { return recorded_; }

 private:
  void add(const ScheduleEntry& entry);
  [[noreturn]] void throwDiffers(const std::string& came, size_t place);

  bool following_ = false;               // a step with a fixed order is open
  bool isRecorded_ = false;              // recorded_ is complete
  size_t next_ = 0;                      // index of the next entry
  std::vector<ScheduleEntry> recorded_;  // entries of the recorded step
  std::map<std::pair<std::string, int32_t>, int32_t> forwards_;  // counts, by layer and stage
};

}  // namespace ebb
