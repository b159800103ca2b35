// In which order a step's layers run forward and backward.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ebb/export.h"

namespace ebb {

// One layer's forward or backward on one micro-batch. The layer is a number of PageSchedule's.
struct ScheduleEntry {
  int32_t stage = 0;       // of a pipeline
  int32_t layer = 0;       // region name
  int32_t microbatch = 0;  // from 0
  bool backward = false;

  ScheduleEntry reversed() const {
    return {stage, layer, microbatch, !backward};
  }
  auto operator<=>(const ScheduleEntry&) const = default;
};

// Note [Page schedules]
// A step that the user brackets is a list of entries, and each step runs the same list: the first
// is recorded, those that follow are compared with it. So it is known what comes next. A layer
// whose backward follows its forward at once is not paged; a layer's pages come back while the
// layer behind it runs backward. Other steps have no list; those that nobody
// brackets begin and end when nothing is stashed.
class EBB_API PageSchedule {
 public:
  // A step begins. The first that ends after clear() is recorded.
  void begin();

  // It ends. Throws if entries of the recorded step are missing, unless all are: then nothing was
  // paged.
  void end();

  // From now on nothing is recorded or compared, until the next begin().
  void abandon();

  // The next step is recorded.
  void clear();

  // The forward of a region: micro-batches are counted unless the user names one.
  ScheduleEntry forward(
      const std::string& region, int32_t stage, std::optional<int32_t> microbatch);

  // The backward of what forward() gave.
  void backward(const ScheduleEntry& forward);

  // Whether the backward of the entry that came last comes next. Of a recorded step: at `forward`.
  bool isTurningPoint() const;
  bool isTurningPoint(const ScheduleEntry& forward) const;

  // The forward whose backward comes next; nothing if that is not known.
  std::optional<ScheduleEntry> nextBackward() const;

  // "forward of 'experts', stage 0, micro-batch 2"
  std::string describe(const ScheduleEntry& entry) const;

  // Micro-batches are counted from 0 again.
  void restartCounts() {
    forwards_.clear();
  }

  // Whether there is a step to compare with.
  bool isRecorded() const {
    return isRecorded_;
  }
  const std::vector<ScheduleEntry>& recorded() const {
    return recorded_;
  }

 private:
  void add(const ScheduleEntry& entry);
  [[noreturn]] void throwDiffers(const std::string& came, size_t place);

  bool following_ = false;                                   // a bracketed step is going on
  bool isRecorded_ = false;                                  // recorded_ is whole
  size_t next_ = 0;                                          // place of the next entry
  std::vector<ScheduleEntry> recorded_;                      // of the first step
  std::vector<std::string> layers_;                          // region names
  std::map<std::pair<int32_t, int32_t>, int32_t> forwards_;  // in this step, by stage and layer
};

}  // namespace ebb
