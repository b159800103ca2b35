// The paging engine moves valid rows to page pools after forward has produced them, and back in
// backward.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ebb/paging.h"
#include "hooks/store.h"
#include "plugins/paging/page_stash.h"
#include "plugins/paging/pool_set.h"
#include "plugins/paging/step.h"
#include "stores/dropping_mutex.h"

namespace ebb {

// Note [Pages that come back ahead]
// A replay ahead of backward restores pages as a prefetch does, and uses the bytes at once. The
// rest of a fetch waits until backward arrives at the region:
// * The region's backward is added to the schedule, and the next region's pages are prefetched.
// * The stash counts as back. Steps end and pools are sized by this count.
// * Errors of the pool are thrown.
// So none of these depends on how far the thread of replays ahead has come. For the same reason,
// the backward of a region that may be replayed ahead begins when backward arrives there, not at
// the first fetch. A replay ahead does not fetch a stash if the pool has had an error, or if a CUDA
// graph uses the pool, since the compute stream then orders the pool's calls.
//
// Values, stashes and the Python functions of paging call the public methods. Most private
// methods handle one event in the life of a stash.
class EBB_API Paging {
 public:
  static Paging& get();

  // Throws PageOverflow's Python equivalent. Set once, at import.
  void (*throwOverflow)(const std::string& message) = nullptr;

  void configure(const PagingSettings& settings);
  PagingSettings settings();

  // Stashes the valid rows; the caller drops its reference to the storage. Throws c10::ValueError
  // if the host knows the count and the count is negative or more than the rows. In blocking mode,
  // throws PageOverflow if the pool is full.
  c10::intrusive_ptr<Stash> send(const PageSource& source, const PageGroupPtr& group);

  // See Stash. Throws if the pool has had an error.
  c10::Storage fetch(PageStash& stash, const c10::Storage& living);

  // See Stash.
  void beforeWrite(PageStash& stash);

  // Fetches before backward arrives; null if the stash must wait. See Note [Pages that come back
  // ahead].
  c10::Storage fetchAhead(PageStash& stash, const c10::Storage& living);

  // Backward has arrived at the region of `group`; `cameBack` lists the stashes fetched ahead.
  // Handles the stashes from the last to the first, and removes each one after its error check. A
  // stash with an error to throw stays in the list.
  void backwardArrives(PageGroup& group, std::vector<c10::intrusive_ptr<Stash>>& cameBack);

  // Called by the stash's destructor.
  void forget(PageStash& stash);

  // Begins an explicit step: paging.step() or run_step(). With `fixedOrder` the step has a
  // schedule: see Note [Page schedules]. With `raisesLate` an overflow raises only at the end of
  // the step.
  void beginStep(bool fixedOrder, bool raisesLate);

  // Ends the explicit step, and throws if entries of the schedule are missing.
  void endStep();

  // Ends an explicit step that failed.
  void abandonStep();

  // Records the next step; nothing is paged until that step has ended.
  void recordNext();

  // True if the gradients of this step are valid, that is, no pool overflowed. Waits for the pools.
  // After an overflow the next step is recorded. Throws for other errors.
  bool stepOk();

  // The error bits of this step, see pool/layout.h, and those of them that the user has not been
  // told of. Has no side effects. During a capture the host may not wait for the pools, so their
  // new errors are missing. After stepOk() has found an invalid step, the result stays until the
  // next step begins.
  std::pair<int64_t, int64_t> errors();

  // One float32 on `device`: 1 if a pool there had an error, else 0. The host does not wait.
  at::Tensor foundInf(c10::Device device);

  PagingStats stats();

  // Drops pools, schedule and all other state, except errors that the user has not been told of.
  void reset();

 private:
  template <class F>
  auto telling(const F& locked);
  void bring(PageStash& stash, const c10::Storage& living);
  void stepBegins();
  void stepEnds();
  void copyRows(PageStash& stash, const PageSource& source);
  void sendToPool(PageStash& stash, const PageSource& source, const TrackedPoolPtr& pool);
  void checkOverflow(TrackedPool& pool, const PageSource& source, const PageStash& stash);
  void backwardBegins(PageGroup& group);
  void giveUp(PageStash& stash);
  void takeRestored(PageStash& stash);
  void checkErrors(const PageStash& stash);
  static void noteMade(PageStash& stash);
  static void takeOver(PageStash& stash);
  void startRestoring(PageStash& stash);
  void takeBack(PageStash& stash);
  void endFetch(PageStash& stash);
  void noteErrors(int64_t errors);
  [[noreturn]] void tellOverflow(int64_t errors, const std::string& what);

  DroppingMutex mutex_;  // guards all members
  PagingSettings settings_;
  PoolSet pools_{mutex_};
  PageStep step_;
  uint64_t alive_ = 0;            // stashes of all steps that are not back
  int64_t reportedErrors_ = 0;    // error bits of this step that the user has been told of
  int64_t unreportedErrors_ = 0;  // error bits of dropped pools that the user has not been
                                  // told of
  uint64_t outOfMemoryIn_ = 0;    // step in which a prefetch ran out of memory: no more
                                  // prefetches there
  PagingStats counts_;
};

}  // namespace ebb
