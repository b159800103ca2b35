// A step: the stashes of the step, and their order.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "plugins/paging/log.h"
#include "plugins/paging/page_stash.h"
#include "plugins/paging/schedule.h"

namespace ebb {

// The paging engine's view of the current step. The user begins and ends an explicit step
// (paging.step(), run_step()). Any other step begins with the first stash and ends when no
// stash is left. See Note [Page schedules].
class PageStep {
 public:
  void begin();

  // Decides which steps are recorded.
  PageLog& log() { return log_; }

  // The user begins a step. With `fixedOrder` the step has a schedule. With `raisesLate` an
  // overflow raises only at the end of the step.
  void openBracket(bool fixedOrder, bool raisesLate);
  void closeBracket();
  void abandonBracket();
  bool isBracketed() const { return bracketed_; }
  bool raisesLate() const { return bracketed_ && raisesLate_; }

  // True if the next stash begins a new step: this step has ended, or cannot end because the
  // program keeps an autograd graph alive.
  bool isOver() const;

  // Called for each stash of `group`, the stashes of one region. The first call in a step adds the
  // group's forward to the schedule and returns true.
  bool enter(const PageGroupPtr& group);

  void stashed(PageStash& stash);

  // Called for each fetch of `group`. The first call adds the group's backward to the schedule, and
  // returns the group whose backward comes next. Null if unknown.
  PageGroupPtr backwardBegins(PageGroup& group);

  // A fetch of `stash` has begun.
  void noteComeback(const PageStash& stash);

  // `stash` is back, or was dropped without a fetch.
  void countBack(const PageStash& stash);

  // Called when a stash dies without a fetch. Ends the step if none of its stashes is left and at
  // least one was fetched. If none was fetched, a graph died without a backward: the step goes on.
  void endIfDone();

  // True if no stash of the step is left.
  bool allIsBack() const { return count_ == 0; }

  // Ends the step, unless it is an explicit step. Returns whether the step has ended.
  bool endUnlessBracketed();

  // The needs of the recorded step, by pool. Empties the log.
  PageNeeds takeNeeds(int64_t pageRows);

  // Forgets all state.
  void clear();

  uint64_t number() const { return number_; }
  std::vector<std::string> schedule() const;

 private:
  PageSchedule schedule_;
  PageLog log_;
  std::map<ScheduleEntry, std::weak_ptr<PageGroup>> groups_;  // of this step, by their forward
  uint64_t number_ = 0;                                       // of this step
  uint64_t count_ = 0;          // stashes of this step that are not back
  uint64_t groupsEntered_ = 0;  // regions that stashed in this step
  bool bracketed_ = false;      // the user has begun a step
  bool raisesLate_ = false;     // see openBracket
  bool open_ = false;           // a step has begun and not ended
  bool cameBack_ = false;       // a fetch has begun in this step
};

}  // namespace ebb
