#include "paging/paging.h"

#include <ATen/ops/_assert_async.h>
#include <ATen/ops/eq.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "intercept/key.h"
#include "memory/bytes.h"
#include "memory/pinned.h"
#include "paging/page_stash.h"

namespace ebb {
namespace {

constexpr Paging::Place kNoPlace{0, std::nullopt};

// The stage and micro-batch that a thread's user named, for threads whose user did.
struct Places {
  std::mutex mutex;
  std::unordered_map<std::thread::id, Paging::Place> named;
};

Places& places() {
  static auto* instance = new Places;
  return *instance;
}

Paging::Place currentPlace() {
  std::lock_guard<std::mutex> lock(places().mutex);
  const auto found = places().named.find(std::this_thread::get_id());
  return found == places().named.end() ? kNoPlace : found->second;
}

at::Tensor rowsIn(const c10::Storage& storage, PageRows rows) {
  return bytesOf(storage, rows.count * rows.bytes).view({rows.count, rows.bytes});
}

// Regions of a step that has no end, since some graph is kept alive: it ends then.
constexpr uint64_t kEndless = 10'000;

bool hasNan(c10::ScalarType dtype) {
  return c10::isFloatingType(dtype) || c10::isComplexType(dtype);
}

std::string describe(const PageSource& source, const PageGroup& group) {
  return c10::str("the output of ", source.op, " in region '", group.region, "'");
}

void checkCount(int64_t live, const PageSource& source, const PageGroup& group) {
  TORCH_CHECK_VALUE(
      live >= 0 && live <= source.most,
      "ebb: cannot page ",
      describe(source, group),
      ": ebb.mark_rows said that ",
      live,
      " of its ",
      source.most,
      " rows live.");
}

}  // namespace

PagedStash::PagedStash(const PageSource& source, PageGroupPtr group, uint64_t step)
    : nbytes_(source.storage.nbytes()),
      device_(source.storage.device()),
      dtype_(source.dtype),
      most_{source.most, static_cast<int64_t>(source.storage.nbytes()) / source.most},
      showDeadRows_(source.showDeadRows),
      group_(std::move(group)),
      step_(step) {
}

PagedStash::~PagedStash() {
  Paging::get().forget(*this);
}

Paging& Paging::get() {
  // Leaked on purpose: handles may outlive static objects.
  static auto* instance = new Paging;
  return *instance;
}

Paging::Lock::Lock(Paging& engine) : engine_(engine) {
  engine_.mutex_.lock();
  ++engine_.depth_;
}

Paging::Lock::~Lock() {
  Dropped dropped;
  if (--engine_.depth_ == 0) {
    dropped.swap(engine_.dropped_);
  }
  engine_.mutex_.unlock();
}

PageLane& Paging::laneOf(c10::Device device) {
  const auto index = device.is_cpu() ? c10::DeviceIndex{-1} : device.index();
  return lanes_.try_emplace(index, device).first->second;
}

Paging::Place Paging::exchangePlace(Place place) {
  const Place before = currentPlace();
  std::lock_guard<std::mutex> lock(places().mutex);
  if (place == kNoPlace) {
    places().named.erase(std::this_thread::get_id());
  } else {
    places().named.insert_or_assign(std::this_thread::get_id(), place);
  }
  return before;
}

[[gnu::cold]] void Paging::warnThatItStays(c10::Device device) {
  TORCH_WARN_ONCE(
      "ebb: PAGE means SAVE for a tensor on ",
      device,
      ": there are page pools on CUDA devices and the CPU. Shown once.");
}

// An overflow is told when the engine's lock has been given back: making Python's exception takes
// the GIL, and whoever has that may wait for the lock.
template <class F>
auto Paging::telling(const F& locked) {
  try {
    return locked();
  } catch (const PageOverflow& overflow) {
    if (throwOverflow_ != nullptr) {
      throwOverflow_(overflow.what_without_backtrace());
    }
    throw;
  }
}

c10::intrusive_ptr<Away> Paging::send(const PageSource& source, const PageGroupPtr& group) {
  return telling([&] { return sendLocked(source, group); });
}

c10::Storage Paging::fetch(PagedStash& stash, const c10::Storage& living) {
  return telling([&] { return fetchLocked(stash, living); });
}

c10::intrusive_ptr<Away> Paging::sendLocked(const PageSource& source, const PageGroupPtr& group) {
  const Lock lock(*this);
  const auto below = belowEverything();
  if (!open_ || (!bracketed_ && (badStep_ != 0 || groupsEntered_ > kEndless))) {
    stepEnds();
    stepBegins();
  }
  enter(group);
  auto stash = c10::make_intrusive<PagedStash>(source, group, stats_.steps);
  group->stashes.push_back(stash.get());
  ++count_;
  ++alive_;
  ++stats_.stashed;
  const auto pool = pools_.find({stash->device_, stash->dtype_, stash->most_.bytes});
  if (group->resident) {
    stash->bytes_ = source.storage;
    ++stats_.resident;
  } else if (recording_ || pool == pools_.end()) {
    recordNext_ |= !recording_;  // it is of a kind that the recorded step did not have
    copyRows(*stash, source);
  } else {
    sendToPool(*stash, source, pool->second);
  }
  return stash;
}

// The first stash of a region: its forward has come in the step's schedule.
void Paging::enter(const PageGroupPtr& entered) {
  PageGroup& group = *entered;
  if (group.entered && group.step == stats_.steps) {
    return;
  }
  group.entered = true;
  ++groupsEntered_;
  group.cameBack = false;
  group.step = stats_.steps;
  const auto [stage, microbatch] = currentPlace();
  group.forward = schedule_.forward(group.region, stage, microbatch);
  group.resident = schedule_.isTurningPoint();
  groups_[group.forward] = entered;
  for (auto& [device, lane] : lanes_) {
    lane.join(dropped_);  // the layer before is away now, its memory is for this one
  }
}

// See Note [How pools are sized]
void Paging::copyRows(PagedStash& stash, const PageSource& source) {
  TORCH_CHECK(
      !isCapturing(stash.device_),
      "ebb: cannot page ",
      describe(source, *stash.group_),
      " while a CUDA graph is captured: pools are made after a step that ran without. Run one step "
      "before the capture, with the same shapes.");
  const int64_t live = source.count.item<int64_t>();
  checkCount(live, source, *stash.group_);
  const PageRows rows{live, stash.most_.bytes};
  stash.bytes_ = allocate(live * rows.bytes, stash.device_);
  if (live > 0) {
    rowsIn(stash.bytes_, rows).copy_(rowsIn(source.storage, rows), true);
  }
  stash.live_ = live;
  stash.state_ = PagedStash::State::Copied;
  stash.logged_ = log_.stashed(
      {stash.device_, stash.dtype_, rows.bytes}, live, source.most, stash.group_->forward);
}

void Paging::sendToPool(PagedStash& stash, const PageSource& source, const PoolPtr& pool) {
  if (source.count.is_cpu()) {
    checkCount(source.count.item<int64_t>(), source, *stash.group_);
  }
  settleFreed(*pool);
  stash.pool_ = pool;
  stash.slot_ = std::make_shared<Slot>();
  stash.slot_->handle = pool->pages.makeHandle(source.most);
  pool->used = true;
  pool->captured |= isCapturing(stash.device_);
  pool->lane.run(
      [&] {
        pool->pages.stash(stash.slot_->handle, rowsIn(source.storage, stash.most_), source.count);
      },
      {source.storage, source.count.storage(), stash.slot_->handle.state.storage()});
  if (pool->pages.options().isStack) {
    pool->stack.push_back(stash.slot_);
  }
  stash.state_ = PagedStash::State::Paged;
  checkOverflow(*pool, source, stash);
}

void Paging::checkOverflow(Pool& pool, const PageSource& source, const PagedStash& stash) {
  if (settings_.overflow == PageOverflowMode::Assert) {
    if (stash.device_.is_cpu() && *pool.pages.flags().const_data_ptr<int64_t>() != 0) {
      noteBad(readErrors());  // what follows raises
    }
    pool.lane.run(
        [&] {
          const at::Tensor good = at::eq(pool.pages.flags().narrow(0, 0, 1), 0);
          at::_assert_async(good, "ebb: a page pool has no room, or a count of rows cannot be");
        },
        {});
  }
  if (settings_.overflow == PageOverflowMode::Blocking && !isCapturing(stash.device_)) {
    if (const int64_t errors = readErrors()) {
      tellOverflow(errors, describe(source, *stash.group_) + " could not be paged: ");
    }
  }
}

void Paging::tellOverflow(int64_t errors, const std::string& what) {
  noteBad(errors);
  const auto message = c10::str(
      "ebb: ",
      what,
      describePageErrors(errors),
      ". The gradients of this step are of no use; the next step runs unpaged, and larger pools "
      "are made after it.");
  TORCH_CHECK_VALUE(errors == kPagesUsedUp, message);
  throw PageOverflow({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

c10::Storage Paging::fetchLocked(PagedStash& stash, const c10::Storage& living) {
  const Lock lock(*this);
  const auto below = belowEverything();
  using State = PagedStash::State;
  if (stash.state_ == State::Back) {
    return stash.bytes_;
  }
  backwardBegins(*stash.group_);
  cameBack_ |= stash.step_ == stats_.steps;
  if (living) {
    if (stash.state_ == State::Paged || stash.state_ == State::Returning) {
      stash.pool_->lane.wait(stash.ticket_, dropped_);
      freeSlot(stash);
    }
    dropped_.push_back(std::move(stash.bytes_));
    stash.bytes_ = living;
  } else if (stash.state_ == State::Copied) {
    RECORD_USER_SCOPE("ebb::restore");
    const PageFill fill = fillFor(stash);
    const PageRows rows{stash.live_, stash.most_.bytes};
    c10::Storage all = allocate(stash.nbytes_, stash.device_);
    const at::Tensor to = rowsIn(all, stash.most_);
    to.narrow(0, 0, stash.live_).copy_(rowsIn(stash.bytes_, rows), true);
    const at::Tensor dead = to.narrow(0, stash.live_, stash.most_.count - stash.live_);
    if (fill.deadRows == PageDeadRows::FirstRow && stash.live_ > 0) {
      dead.copy_(to.narrow(0, 0, 1).expand_as(dead));
    } else if (fill.deadRows != PageDeadRows::Untouched) {
      dead.fill_(fill.dead);
    }
    stash.bytes_ = std::move(all);
  } else if (stash.state_ != State::Resident) {
    TORCH_CHECK(
        stash.pool_->condemned == 0,
        "ebb: cannot bring back a tensor that was paged in region '",
        stash.group_->region,
        "': its pool has had an error since (",
        describePageErrors(stash.pool_->condemned),
        "). Run its forward again.");
    startRestoring(stash);
    stash.pool_->lane.wait(stash.ticket_, dropped_);
    checkRestored(stash);
  }
  c10::Storage bytes = stash.bytes_;
  isBack(stash);
  if (count_ == 0) {
    for (const auto& [key, pool] : pools_) {
      settleFreed(*pool);
      pool->lane.join(dropped_);
    }
    open_ = bracketed_;
    if (!open_) {
      stepEnds();
    }
  }
  return bytes;
}

// After an error a tensor comes back as NaN. One that has no NaN would not show it: where nobody
// need wait to know, it throws.
void Paging::checkRestored(const PagedStash& stash) {
  if (stash.device_.is_cpu() && !hasNan(stash.dtype_)) {
    const int64_t errors = *stash.pool_->pages.flags().const_data_ptr<int64_t>();
    if (errors != 0) {
      tellOverflow(
          readErrors() | errors,
          "a tensor that was paged in region '" + stash.group_->region + "' cannot be restored: ");
    }
  }
}

// Its layer's backward has come in the schedule; the next one's pages start on their way.
void Paging::backwardBegins(PageGroup& group) {
  if (std::exchange(group.cameBack, true) || group.step != stats_.steps) {
    return;
  }
  schedule_.backward(group.forward);
  const auto next = schedule_.nextBackward();
  const auto found = next ? groups_.find(*next) : groups_.end();
  const PageGroupPtr ahead = found != groups_.end() ? found->second.lock() : nullptr;
  const bool wanted = settings_.prefetch < 0
                          ? laneOf(group.stashes.front()->device_).isBesideCompute()
                          : settings_.prefetch > 0;
  if (wanted && ahead && ahead.get() != &group) {
    const auto& stashes = ahead->stashes;
    for (auto stash = stashes.rbegin(); stash != stashes.rend(); ++stash) {
      startRestoring(**stash);
    }
  }
}

void Paging::startRestoring(PagedStash& stash) {
  if (stash.state_ != PagedStash::State::Paged) {
    return;
  }
  RECORD_USER_SCOPE("ebb::restore");
  Pool& pool = *stash.pool_;
  settleFreed(pool);
  stash.bytes_ = allocate(stash.nbytes_, stash.device_);
  const bool inOrder = pool.stack.empty() || pool.stack.back() == stash.slot_;
  PageFill fill = fillFor(stash);
  fill.keepsPages = pool.pages.options().isStack && !inOrder;
  stash.ticket_ = pool.lane.run(
      [&] {
        at::Tensor to = rowsIn(stash.bytes_, stash.most_);
        pool.pages.restore(stash.slot_->handle, to, fill);
      },
      {stash.slot_->handle.state.storage()});
  pool.used = true;
  stash.state_ = PagedStash::State::Returning;
  stash.slot_->free = true;
  if (pool.pages.options().isStack && inOrder) {
    pool.stack.pop_back();
  }
}

// Nobody needs its rows any more. They are given back when the pool is called next: this may be a
// destructor, on any thread.
void Paging::freeSlot(PagedStash& stash) {
  if (!std::exchange(stash.slot_->free, true)) {
    stash.pool_->freed.push_back(stash.slot_);
  }
}

// In a stack only what is on top can be given back.
void Paging::settleFreed(Pool& pool) {
  auto freed = std::exchange(pool.freed, {});
  if (pool.pages.options().isStack) {
    freed.clear();
    while (!pool.stack.empty() && pool.stack.back()->free) {
      freed.push_back(std::move(pool.stack.back()));
      pool.stack.pop_back();
    }
  }
  for (const auto& slot : freed) {
    pool.lane.run([&] { pool.pages.giveBack(slot->handle); }, {slot->handle.state.storage()});
  }
}

void Paging::beforeWrite(PagedStash& stash) {
  const Lock lock(*this);
  const auto below = belowEverything();
  if (stash.state_ == PagedStash::State::Resident) {
    c10::Storage copy = allocate(stash.nbytes_, stash.device_);
    bytesOf(copy, stash.nbytes_).copy_(bytesOf(stash.bytes_, stash.nbytes_), true);
    dropped_.push_back(std::exchange(stash.bytes_, std::move(copy)));
  } else if (stash.pool_) {
    stash.pool_->lane.join(dropped_);  // the rows have left the storage
  }
}

// It needs nothing from the engine any more.
void Paging::isBack(PagedStash& stash) {
  stash.state_ = PagedStash::State::Back;
  stash.pool_.reset();
  stash.slot_.reset();
  if (stash.logged_ && stash.step_ == stats_.steps) {
    log_.gone(*stash.logged_);
  }
  auto& siblings = stash.group_->stashes;
  const auto last = std::find(siblings.rbegin(), siblings.rend(), &stash);  // most often the first
  if (last != siblings.rend()) {
    siblings.erase(std::next(last).base());
  }
  --alive_;
  count_ -= stash.step_ == stats_.steps ? 1 : 0;
}

// Nobody will ask for it.
void Paging::forget(PagedStash& stash) {
  const Lock lock(*this);
  if (stash.state_ == PagedStash::State::Back) {
    return;
  }
  if (stash.pool_) {
    freeSlot(stash);
    if (stash.ticket_.number != 0) {
      stash.pool_->lane.wait(stash.ticket_, dropped_);
    }
  }
  dropped_.push_back(std::move(stash.bytes_));
  isBack(stash);
  // Else it was a graph that nobody wanted, and the step goes on.
  open_ = open_ && (bracketed_ || count_ > 0 || !cameBack_);
}

PageFill Paging::fillFor(const PagedStash& stash) const {
  const unsigned char shows = hasNan(stash.dtype_) ? 0xFF : 0;
  const auto filled = [&](unsigned char byte) {
    return PageFill{PageDeadRows::Filled, byte, shows, false};
  };
  if (stash.showDeadRows_) {
    return filled(shows);
  }
  switch (settings_.deadRows) {
    case DeadRows::Repeat:
      return {PageDeadRows::FirstRow, 0, shows, false};
    case DeadRows::Zero:
      return filled(0);
    case DeadRows::Nan:
      return filled(shows);
    case DeadRows::None:
      break;
  }
  return {PageDeadRows::Untouched, 0, shows, false};
}

}  // namespace ebb
