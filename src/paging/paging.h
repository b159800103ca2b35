// The paging engine: live rows that go to page pools after forward has made them, and come back in
// backward.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ebb/paging.h"
#include "memory/stash.h"
#include "paging/lane.h"
#include "paging/log.h"
#include "paging/pool/pool.h"
#include "paging/schedule.h"
#include "support/python_mutex.h"

namespace ebb {

class PagedStash;

// What one outermost region has stashed: a layer, of one micro-batch.
struct PageGroup {
  explicit PageGroup(std::string name) : region(std::move(name)) {
  }

  const std::string region;          // its name
  uint64_t step = 0;                 // in which it was stashed
  bool entered = false;              // `forward` is known
  bool cameBack = false;             // its backward has begun
  bool resident = false;             // see Note [Page schedules]
  ScheduleEntry forward{};           // in the step's schedule
  std::vector<PagedStash*> stashes;  // that exist, in the order of stashing
};
using PageGroupPtr = std::shared_ptr<PageGroup>;

// Rows that are to be stashed: all of a storage, row after row.
struct PageSource {
  const c10::Storage& storage;
  c10::ScalarType dtype;    // of what is in it
  const at::Tensor& count;  // of live rows: one int64, on the storage's device
  int64_t most;             // rows that there are
  const char* op;           // that made it, for messages
  bool showDeadRows;        // dead rows come back as bytes that show, see Note [Dead rows]
};

// Note [Dead rows]
// What is in rows that do not live is nobody's business: that is what the user says with mark_rows.
// But kernels compute with it: 0 / 0 in a row whose gradient is zero is NaN, and a product over all
// rows spreads that. So dead rows come back as copies of the first row that lives, of which the
// program makes nothing worse. Where none lives the first dead row is kept for that. In verify mode
// they come back as NaN, so that a program which depends on them shows.

// Note [How pools are sized]
// In a step that is recorded, live rows are copied to memory of exactly their size, for which the
// host must know their number and waits for it. When the step is over the most that was in use at a
// time is known, pools are made for it with some room to spare, and the host waits no more. If
// there was not enough room in a step its gradients are of no use, and the next step is recorded
// again.
class EBB_API Paging {
 public:
  static Paging& get();

  void configure(const PagingSettings& settings);
  PagingSettings settings();

  // Whether ebb can page what is on this device.
  static bool takes(c10::Device device) {
    const bool taken = device.is_cpu() || device.is_cuda();
    if (!taken) {
      warnThatItStays(device);
    }
    return taken;
  }

  // Stashes the live rows; the caller gives up its reference to the storage. Throws c10::ValueError
  // if the count cannot be, where the host knows it, and PageOverflow in blocking mode.
  c10::intrusive_ptr<Away> send(const PageSource& source, const PageGroupPtr& group);

  // A step of the user's begins and ends. With `fixedOrder` it has a schedule: see Note [Page
  // schedules].
  void beginStep(bool fixedOrder);
  void endStep();
  void abandonStep();

  // Names the stage and the micro-batch of what this thread's regions stash from now on. Gives
  // those before.
  using Place = std::pair<int32_t, std::optional<int32_t>>;
  static Place exchangePlace(Place place);

  // The next step is recorded, and until it has ended nothing is paged.
  void recordNext();

  // Whether the gradients of this step are good: no pool had too little room. Waits for the pools.
  // If they are not the next step is recorded. Throws for other errors.
  bool stepOk();

  // The same, but changes nothing and throws nothing: bits, see page_layout.h. After stepOk() found
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
  friend class PagedStash;

  // A pool, and what must be known of it on the host.
  struct Slot {
    PageHandle handle;
    bool free = false;  // nobody needs its rows any more
  };
  struct Pool {
    Pool(const PagePoolOptions& options, PageLane& on) : pages(options), lane(on) {
    }
    // What readErrors() saw last; 0 before.
    int64_t errorsSeen() const {
      return seen.defined() ? seen.const_data_ptr<int64_t>()[0] : 0;
    }

    PagePool pages;
    PageLane& lane;
    std::vector<std::shared_ptr<Slot>> stack;  // in a stack: those that hold rows
    std::vector<std::shared_ptr<Slot>> freed;  // to be given back at the next call
    at::Tensor seen;                           // its flags on the host; pinned memory
    bool used = false;                         // since its flags were read last
    bool captured = false;                     // a CUDA graph has its address
    int64_t condemned = 0;                     // error bits it had when it was dropped
  };
  using PoolPtr = std::shared_ptr<Pool>;
  using Dropped = std::vector<c10::Storage>;

  // See Note [Nothing dies under the engine's lock] in offload.h.
  class Lock {
   public:
    explicit Lock(Paging& engine);
    ~Lock();
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

   private:
    Paging& engine_;
  };

  PageLane& laneOf(c10::Device device);
  void stepBegins();
  void stepEnds();
  template <class F>
  auto telling(const F& locked);
  c10::intrusive_ptr<Away> sendLocked(const PageSource& source, const PageGroupPtr& group);
  c10::Storage fetchLocked(PagedStash& stash, const c10::Storage& living);
  void enter(const PageGroupPtr& group);
  void sendToPool(PagedStash& stash, const PageSource& source, const PoolPtr& pool);
  void copyRows(PagedStash& stash, const PageSource& source);
  void checkOverflow(Pool& pool, const PageSource& source, const PagedStash& stash);
  c10::Storage fetch(PagedStash& stash, const c10::Storage& living);
  void beforeWrite(PagedStash& stash);
  void checkRestored(const PagedStash& stash);
  void backwardBegins(PageGroup& group);
  void startRestoring(PagedStash& stash);
  void freeSlot(PagedStash& stash);
  void settleFreed(Pool& pool);
  void isBack(PagedStash& stash);
  void forget(PagedStash& stash);
  void makePools();
  PagePoolOptions sizeOf(const PoolKey& key, const PageLog::Need& need) const;
  int64_t readErrors();
  void noteBad(int64_t errors);
  [[noreturn]] void tellOverflow(int64_t errors, const std::string& what);
  void dropPools();
  PageFill fillFor(const PagedStash& stash) const;

  PythonMutex mutex_;  // guards everything; see Note [Locks and the GIL]
  PagingSettings settings_;
  std::map<c10::DeviceIndex, PageLane> lanes_;  // of CUDA devices; -1: the CPU
  std::map<PoolKey, PoolPtr> pools_;            // in use
  std::vector<PoolPtr> retired_;                // not used any more, but a CUDA graph has them
  std::map<PoolKey, int64_t> grown_;            // rows that a pool must have, since it had too few;
                                                // it is no stack then: order may be the cause
  PageSchedule schedule_;
  PageLog log_;                                               // of the step that is recorded
  std::map<PoolKey, PageLog::Need> needs_;                    // of the step that was recorded last
  std::map<ScheduleEntry, std::weak_ptr<PageGroup>> groups_;  // of this step, by their forward
  bool recording_ = true;                                     // live rows are copied, see above
  bool recordNext_ = false;                                   // the next step is to be recorded
  bool bracketed_ = false;                                    // the user has begun a step
  bool open_ = false;                                         // a step is going on
  bool cameBack_ = false;                                     // something has, in this step
  uint64_t count_ = 0;          // stashes of this step that are not back
  uint64_t alive_ = 0;          // likewise, of all steps
  uint64_t groupsEntered_ = 0;  // regions that stashed in this step
  int64_t badStep_ = 0;         // error bits of this step that the user has been told of
  int64_t untold_ = 0;          // ... of pools that are gone, that the user has not been told of
  PagingStats stats_;           // counts
  void (*throwOverflow_)(const std::string&) = nullptr;
  size_t depth_ = 0;  // how often the lock is held
  Dropped dropped_;   // goes when the lock is given back
};

}  // namespace ebb
