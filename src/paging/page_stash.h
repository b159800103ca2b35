// One storage's live rows, while they are away.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/Storage.h>

#include "memory/arena.h"
#include "memory/stash.h"
#include "paging/paging.h"

namespace ebb {

class PagedStash final : public Away, public InArena {
 public:
  PagedStash(const PageSource& source, PageGroupPtr group, uint64_t step);
  ~PagedStash() override;

  c10::Storage fetch(const c10::Storage& living) override {
    return Paging::get().fetch(*this, living);
  }
  void beforeWrite() override {
    Paging::get().beforeWrite(*this);
  }

 private:
  friend class Paging;
  enum class State : uint8_t {
    Resident,   // the storage itself is held: its backward comes next
    Copied,     // live rows are in memory of their size
    Paged,      // ... in a pool
    Returning,  // being restored
    Back,       // fetched: the engine has nothing to do with it any more
  };

  const size_t nbytes_;
  const c10::Device device_;
  const c10::ScalarType dtype_;
  const PageRows most_;
  const bool showDeadRows_;
  const PageGroupPtr group_;
  const uint64_t step_;  // in which it was stashed
  State state_ = State::Resident;
  c10::Storage bytes_;                  // Resident, Returning, Back: all; Copied: the live rows
  int64_t live_ = 0;                    // rows, if Copied
  std::optional<size_t> logged_;        // its number in Paging::log_
  Paging::PoolPtr pool_;                // if Paged or Returning
  std::shared_ptr<Paging::Slot> slot_;  // there
  PageLane::Ticket ticket_;             // of the restore
};

}  // namespace ebb
