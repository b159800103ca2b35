#include "plugins/paging/step.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ebb {
namespace {

// Number of regions after which ebb ends a step that cannot end by itself, since the program keeps
// a graph alive.
constexpr uint64_t kEndless = 10'000;

}  // namespace

void PageStep::begin() {
  log_.stepBegins();
  schedule_.restartCounts();
  groups_.clear();
  count_ = 0;
  groupsEntered_ = 0;
  open_ = true;
  cameBack_ = false;
  ++number_;
}

void PageStep::openBracket(bool fixedOrder, bool raisesLate) {
  bracketed_ = true;
  raisesLate_ = raisesLate;
  if (fixedOrder) {
    schedule_.begin();
  }
}

void PageStep::closeBracket() {
  bracketed_ = open_ = false;
  try {
    schedule_.end();
  } catch (...) {
    log_.recordNext = true;
    throw;
  }
}

void PageStep::abandonBracket() {
  bracketed_ = open_ = false;
  schedule_.abandon();
  if (log_.isRecording || !schedule_.isRecorded()) {
    log_.recordNext = true;
  }
}

bool PageStep::isOver() const { return !open_ || (!bracketed_ && groupsEntered_ > kEndless); }

bool PageStep::enter(const PageGroupPtr& entered) {
  PageGroup& group = *entered;
  if (group.step == number_) {
    return false;
  }
  group.cameBack = false;
  group.step = number_;
  group.forward = schedule_.forward(group.region);
  group.resident = schedule_.isFollowing() && schedule_.isTurningPoint(group.forward);
  groups_[group.forward] = entered;
  ++groupsEntered_;
  return true;
}

void PageStep::stashed(PageStash& stash) {
  stash.group->stashes.push_back(&stash);
  ++count_;
}

PageGroupPtr PageStep::backwardBegins(PageGroup& group) {
  if (std::exchange(group.cameBack, true) || group.step != number_) {
    return nullptr;
  }
  schedule_.backward(group.forward);
  const auto next = schedule_.nextBackward();
  const auto found = next ? groups_.find(*next) : groups_.end();
  PageGroupPtr ahead = found != groups_.end() ? found->second.lock() : nullptr;
  return ahead.get() == &group ? nullptr : ahead;
}

void PageStep::noteComeback(const PageStash& stash) { cameBack_ |= stash.step == number_; }

void PageStep::countBack(const PageStash& stash) {
  auto& siblings = stash.group->stashes;
  const auto last = std::find(siblings.rbegin(), siblings.rend(), &stash);  // usually the latest
  if (last != siblings.rend()) {
    siblings.erase(std::next(last).base());
  }
  if (stash.step == number_) {
    --count_;
    if (stash.copied) {
      log_.gone(stash.copied->logged);
    }
  }
}

void PageStep::endIfDone() { open_ = open_ && (bracketed_ || count_ > 0 || !cameBack_); }

bool PageStep::endUnlessBracketed() {
  open_ = bracketed_;
  return !open_;
}

PageNeeds PageStep::takeNeeds(int64_t pageRows) {
  return log_.takeNeeds(
      pageRows, [this](const ScheduleEntry& forward) { return schedule_.isTurningPoint(forward); });
}

// The step's number increases, so stashes from before do not count for any later step.
void PageStep::clear() {
  const uint64_t number = number_ + 1;
  *this = PageStep();
  number_ = number;
}

std::vector<std::string> PageStep::schedule() const {
  std::vector<std::string> entries;
  for (const ScheduleEntry& entry : schedule_.recorded()) {
    entries.push_back(entry.describe());
  }
  return entries;
}

}  // namespace ebb
