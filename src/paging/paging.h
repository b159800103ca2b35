// The paging engine: live rows that go to page pools after forward has made them, and come back in
// backward.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ebb/paging.h"
#include "memory/dropping_mutex.h"
#include "memory/stash.h"
#include "paging/page_stash.h"
#include "paging/pool/movers.h"
#include "paging/pool_set.h"
#include "paging/step.h"

namespace ebb {

// Throws c10::ValueError for settings that make no sense.
void checkSettings(const PagingSettings& settings);

// Note [Pages that come back ahead]
// A replay ahead of backward brings pages back as a prefetch does, and hands them out; what else
// there is to a fetch waits until backward arrives at the region. Then the region's backward comes
// in the schedule, and the next one's pages start on their way; the stash counts as back, by which
// steps end and pools are sized; and what there is to say of its pool is thrown. So none of that
// depends on how far a thread has come. For the same reason a region's backward begins where it
// arrives, and not with the first pages that it asks for, in all regions that may be replayed
// ahead. What would not be right, or is not known to be, is left to backward: where the pool has
// had an error, and where a CUDA graph has the pool, whose calls come in the order of the compute
// stream.
//
// Note [Dead rows]
// What is in rows that do not live is nobody's business: that is what the user says with mark_rows.
// But kernels compute with it: 0 / 0 in a row whose gradient is zero is NaN, and a product over all
// rows spreads that. So dead rows come back as copies of the first row that lives, of which the
// program makes nothing worse. Where none lives the first dead row is kept for that. In verify mode
// they come back as NaN, so that a program which depends on them shows.
//
// Its methods are many: what values, users and stashes ask of it, and under that the way of one
// stash, step by step.
class EBB_API Paging {
 public:
  static Paging& get();

  void configure(const PagingSettings& settings);
  PagingSettings settings();

  // Whether ebb can page what is on this device.
  static bool takes(c10::Device device) {
    const bool taken = hasPageMover(device.type());
    if (!taken) {
      warnThatItStays(device);
    }
    return taken;
  }

  // Stashes the live rows; the caller gives up its reference to the storage. Throws c10::ValueError
  // if the count cannot be, where the host knows it, and PageOverflow in blocking mode.
  c10::intrusive_ptr<Stash> send(const PageSource& source, const PageGroupPtr& group);

  // See Stash. Throws if the pool has had an error.
  c10::Storage fetch(PageStash& stash, const c10::Storage& living);
  void beforeWrite(PageStash& stash);

  // See Note [Pages that come back ahead]. Backward is at what `group` has stashed, of which
  // `cameBack` was fetched ahead; those are dropped one by one, and one of which something is to be
  // thrown stays.
  c10::Storage fetchAhead(PageStash& stash, const c10::Storage& living);
  void backwardArrives(PageGroup& group, std::vector<c10::intrusive_ptr<Stash>>& cameBack);

  // Nobody will ask for it: its destructor says so.
  void forget(PageStash& stash);

  // A step of the user's begins and ends. With `fixedOrder` it has a schedule: see Note [Page
  // schedules]. With `raisesLate` a pool with too little room raises only at the end of the step.
  void beginStep(bool fixedOrder, bool raisesLate);
  void endStep();
  void abandonStep();

  // The next step is recorded, and until it has ended nothing is paged.
  void recordNext();

  // Whether the gradients of this step are good: no pool had too little room. Waits for the pools.
  // If they are not the next step is recorded. Throws for other errors.
  bool stepOk();

  // The same, but changes nothing and throws nothing: bits, see pool/layout.h; while a graph is
  // captured 0, since nobody may wait. After stepOk() found
  // a step bad: what it found, until another step begins.
  int64_t errors();

  // Whether that is all that the user has been told of already.
  bool wasTold();

  // One float32 on `device`: 1 if some pool there had an error, else 0. Nobody waits.
  at::Tensor foundInf(c10::Device device);

  PagingStats stats();

  // Set once, at import: throws what Python knows as PageOverflow.
  void setThrow(void (*throwOverflow)(const std::string& message));

  // Drops pools, schedule and everything known but errors that nobody has been told of.
  void reset();

 private:
  static void warnThatItStays(c10::Device device);
  template <class F>
  auto telling(const F& locked);
  c10::intrusive_ptr<Stash> sendLocked(const PageSource& source, const PageGroupPtr& group);
  c10::Storage fetchLocked(PageStash& stash, const c10::Storage& living);
  void bring(PageStash& stash, const c10::Storage& living);
  void stepBegins();
  void stepEnds();
  void copyRows(PageStash& stash, const PageSource& source);
  void sendToPool(PageStash& stash, const PageSource& source, const TrackedPoolPtr& pool);
  void checkOverflow(TrackedPool& pool, const PageSource& source, const PageStash& stash);
  void backwardBegins(PageGroup& group);
  void takeLiving(PageStash& stash, const c10::Storage& living);
  void giveUp(PageStash& stash);
  void takeCopied(PageStash& stash);
  void takeRestored(PageStash& stash);
  void checkErrors(const PageStash& stash);
  static void noteMade(PageStash& stash);
  static void takeOver(PageStash& stash);
  void startRestoring(PageStash& stash);
  void takeBack(PageStash& stash);
  void isBack(PageStash& stash);
  void noteErrors(int64_t errors);
  [[noreturn]] void tellOverflow(int64_t errors, const std::string& what);

  DroppingMutex mutex_;  // guards everything
  PagingSettings settings_;
  PoolSet pools_{mutex_};
  PageStep step_;
  uint64_t alive_ = 0;                  // stashes of all steps that are not back
  int64_t reportedErrors_ = 0;          // error bits of this step that the user has been told of
  int64_t unreportedErrors_ = 0;        // of pools that are gone; nobody has been told
  uint64_t outOfMemoryIn_ = 0;          // a step in which nothing comes back ahead any more
  std::vector<c10::Storage> ofGraphs_;  // live rows that were copied, of which a CUDA graph knows
  PagingStats counts_;
  void (*throwOverflow_)(const std::string&) = nullptr;
};

}  // namespace ebb
