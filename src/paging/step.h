// A step: what it stashed, and in which order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "paging/log.h"
#include "paging/page_stash.h"
#include "paging/schedule.h"

namespace ebb {

// The paging engine's view of the step that goes on. One that the user brackets begins and ends
// when told; any other begins with the first stash and ends when nothing is stashed any more. See
// Note [Page schedules].
// Its methods are many, and each is one thing that happens in a step.
class PageStep {
 public:
  // A step begins. With isToBeRecorded() it is one that is recorded, see Note [How pools are
  // sized].
  void begin();
  bool isToBeRecorded() const {
    return recordNext_;
  }
  void recordNext() {
    recordNext_ = true;
  }

  // The user brackets it; with `fixedOrder` it has a schedule. With `raisesLate` a pool with too
  // little room raises only at the end of the step.
  void openBracket(bool fixedOrder, bool raisesLate);
  void closeBracket();
  void abandonBracket();
  bool isBracketed() const {
    return bracketed_;
  }
  bool raisesLate() const {
    return bracketed_ && raisesLate_;
  }

  // Whether what is stashed now is of the next one: it has ended, or has no end since some graph is
  // kept alive.
  bool isOver() const;

  // `group` stashes. If it is the first time in this step its forward has come in the schedule;
  // whether that is so.
  bool enter(const PageGroupPtr& group);

  void stashed(PageStash& stash);
  void copied(PageStash& stash);  // its live rows, since the step is recorded

  // Its backward has begun, and is the first to ask for anything of the group. Gives the group
  // whose backward comes next; null if that is not known.
  PageGroupPtr backwardBegins(PageGroup& group);

  // Something of it is asked for. Something is back, or nobody will ask for it.
  void noteComeback(const PageStash& stash);
  void countBack(const PageStash& stash);

  // Nobody asks for something that was stashed. Else it was a graph that nobody wanted, and the
  // step goes on.
  void endIfDone();

  // After all has come back it ends, unless it is bracketed. Whether it has.
  bool allIsBack() const {
    return count_ == 0;
  }
  bool endUnlessBracketed();

  // Whether its log says what pools must hold; what they must; from then on steps have pools.
  bool isRecorded() const {
    return recording_ && !log_.isEmpty();
  }
  PageNeeds takeNeeds(int64_t pageRows);
  void hasPools() {
    recording_ = false;
  }
  bool isRecording() const {
    return recording_;
  }

  // Everything known is forgotten.
  void clear();

  uint64_t number() const {
    return number_;
  }
  std::vector<std::string> schedule() const;

 private:
  PageSchedule schedule_;
  PageLog log_;                                               // of a step that is recorded
  std::map<ScheduleEntry, std::weak_ptr<PageGroup>> groups_;  // of this step, by their forward
  uint64_t number_ = 0;                                       // of this step
  uint64_t count_ = 0;          // stashes of this step that are not back
  uint64_t groupsEntered_ = 0;  // regions that stashed in this step
  bool recording_ = true;       // live rows are copied
  bool recordNext_ = false;     // the next step is to be recorded
  bool bracketed_ = false;      // the user has begun a step
  bool raisesLate_ = false;     // see openBracket
  bool open_ = false;           // a step is going on
  bool cameBack_ = false;       // something has, in this step
};

}  // namespace ebb
