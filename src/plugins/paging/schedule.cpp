#include "plugins/paging/schedule.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace ebb {
namespace {

// See Note [Static TLS]
[[gnu::tls_model("initial-exec")]] constinit thread_local PipelinePlace tlsPlace;

}  // namespace

std::string ScheduleEntry::describe() const {
  return c10::str(
      backward ? "backward" : "forward", " of '", layer, "', stage ", stage, ", micro-batch ",
      microbatch);
}

PipelinePlace exchangePipelinePlace(PipelinePlace place) { return std::exchange(tlsPlace, place); }

void PageSchedule::begin() {
  following_ = true;
  next_ = 0;
  if (!isRecorded_) {
    recorded_.clear();
  }
}

void PageSchedule::end() {
  if (!std::exchange(following_, false)) {
    return;
  }
  if (isRecorded_ && next_ > 0 && next_ < recorded_.size()) {
    throwDiffers("the end of the step", next_);
  }
  isRecorded_ = !recorded_.empty();
}

void PageSchedule::abandon() { following_ = false; }

ScheduleEntry PageSchedule::forward(const std::string& region) {
  const auto [stage, microbatch] = tlsPlace;
  const int32_t counted = forwards_[{region, stage}]++;
  const ScheduleEntry entry{region, stage, microbatch < 0 ? counted : microbatch, false};
  add(entry);
  return entry;
}

void PageSchedule::backward(const ScheduleEntry& forward) { add(forward.reversed()); }

void PageSchedule::add(const ScheduleEntry& entry) {
  if (!following_) {
    return;
  }
  if (!isRecorded_) {
    recorded_.push_back(entry);
  } else if (next_ >= recorded_.size() || recorded_[next_] != entry) {
    throwDiffers("the " + entry.describe(), next_);
  }
  ++next_;
}

void PageSchedule::throwDiffers(const std::string& came, size_t place) {
  const std::string expected =
      place < recorded_.size() ? "the " + recorded_[place].describe() : "the end of the step";
  following_ = false;
  isRecorded_ = false;
  TORCH_CHECK(
      false,
      "ebb: this step of paging runs its layers in another order than the recorded step: "
      "entry ",
      place, " is ", came, ", but was ", expected,
      ". ebb records the next step again; if your steps differ, use "
      "paging.step(fixed_order=False).");
}

bool PageSchedule::isTurningPoint(const ScheduleEntry& forward) const {
  const auto place = std::find(recorded_.begin(), recorded_.end(), forward);
  return isRecorded_ && place != recorded_.end() && place + 1 != recorded_.end() &&
         place[1] == forward.reversed();
}

std::optional<ScheduleEntry> PageSchedule::nextBackward() const {
  const bool known = isFollowing() && next_ < recorded_.size();
  return known && recorded_[next_].backward ? std::optional(recorded_[next_].reversed())
                                            : std::nullopt;
}

}  // namespace ebb
