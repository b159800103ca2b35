#include "plugins/paging/paging_engine.h"

#include <ATen/ops/full.h>
#include <ATen/record_function.h>
#include <c10/util/StringUtil.h>

#include <mutex>

#include "memory/bytes.h"
#include "stream/capture.h"
#include "stream/stream.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

using Lock = std::lock_guard<DroppingMutex>;
using State = PageStash::State;

constexpr double kMostHeadroom = 1000;

void check(bool good, const char* what) { TORCH_CHECK_VALUE(good, "ebb: paging: ", what); }

}  // namespace

Paging& Paging::get() {
  // Leaked on purpose: handles may outlive static objects.
  static auto* instance = new Paging;
  return *instance;
}

void Paging::configure(const PagingSettings& settings) {
  check(settings.pageRows >= 1, "page_rows must be at least 1");
  check(
      settings.headroom >= 1 && settings.headroom <= kMostHeadroom,
      "headroom must be from 1 to 1000");
  check(
      settings.hostHeadroom >= 0 && settings.hostHeadroom <= kMostHeadroom,
      "host_headroom must be from 0 to 1000");
  check(
      settings.prefetch >= -1 && settings.prefetch <= 1,
      "prefetch must be 0, 1, or -1 (the device's default)");
  const Lock lock(mutex_);
  settings_ = settings;
}

PagingSettings Paging::settings() {
  const Lock lock(mutex_);
  return settings_;
}

// Runs `locked`. Raises an overflow only after `locked` has released the engine's lock: making
// Python's exception takes the GIL, and the GIL's owner may be waiting for the lock.
template <class F>
auto Paging::telling(const F& locked) {
  try {
    return locked();
  } catch (const PageOverflow& overflow) {
    if (throwOverflow != nullptr) {
      throwOverflow(overflow.what_without_backtrace());
    }
    throw;
  }
}

c10::intrusive_ptr<Stash> Paging::send(const PageSource& source, const PageGroupPtr& group) {
  return telling([&] {
    const Lock lock(mutex_);
    const auto below = belowEverything();
    pools_.laneOf(source.storage.device());  // throws on a device without pages
    if (step_.isOver() || (!step_.isBracketed() && reportedErrors_ != 0)) {
      stepEnds();
      stepBegins();
    }
    if (step_.enter(group)) {
      pools_.joinLanes();  // so this layer can reuse the memory that the previous layer has paged
    }
    auto stash = c10::make_intrusive<PageStash>(source, group, step_.number());
    step_.stashed(*stash);
    ++alive_;
    ++counts_.stashed;
    const TrackedPoolPtr pool = step_.log().isRecording ? nullptr : pools_.find(stash->kind);
    if (group->resident) {
      stash->bytes = source.storage;
      ++counts_.resident;
    } else if (pool) {
      sendToPool(*stash, source, pool);
    } else {
      copyRows(*stash, source);
    }
    return stash;
  });
}

// See Note [How pools are sized]
void Paging::copyRows(PageStash& stash, const PageSource& source) {
  if (!step_.log().isRecording) {
    step_.log().recordNext = true;  // the recorded step had no tensor of this kind
  }
  TORCH_CHECK(
      !isCapturing(stash.kind.device), "ebb: cannot page ", stash.describe(),
      " during CUDA graph capture: ebb sizes the page pools in a first step without pools. Run one "
      "step with the same shapes before the capture.");
  const int64_t live = source.rows.live->kept.item<int64_t>();
  stash.checkCount(live);
  const PageRows rows{live, stash.whole.bytes};
  stash.bytes = allocate(rows.count * rows.bytes, stash.kind.device);
  noteMade(stash);
  if (live > 0) {
    rowsIn(stash.bytes, rows).copy_(rowsIn(source.storage, rows), true);
    noteUse(source.storage);
  }
  stash.state = State::Copied;
  stash.copied = {
      live, step_.log().stashed(stash.kind, live, stash.whole.count, stash.group->forward)};
}

void Paging::sendToPool(PageStash& stash, const PageSource& source, const TrackedPoolPtr& pool) {
  const at::Tensor& count = source.rows.live->kept;
  if (count.is_cpu()) {
    stash.checkCount(count.item<int64_t>());
  }
  stash.slot = pool->stash(source.storage, stash.whole.count, count);
  stash.pool = pool;
  stash.state = State::Paged;
  if (stash.fill.deadRows == PageDeadRows::Filled) {
    // Releases the storage. A fetch of a living storage would get its old padding rows.
    pool->lane().wait(stash.slot->stashed);
  }
  checkOverflow(*pool, source, stash);
  pool->letGraphsWait();
}

void Paging::checkOverflow(TrackedPool& pool, const PageSource& source, const PageStash& stash) {
  if (settings_.overflow == PageOverflowMode::Assert) {
    if (pool.errorsInSight() != 0) {
      noteErrors(pools_.readErrors());  // assertGood() raises
    }
    pool.assertGood();
  }
  if (settings_.overflow == PageOverflowMode::Blocking && !step_.raisesLate()) {
    if (const int64_t errors = pools_.readErrors()) {
      tellOverflow(errors, stash.describe() + " could not be paged: ");
    }
  }
}

void Paging::tellOverflow(int64_t errors, const std::string& what) {
  noteErrors(errors);
  const auto message = c10::str(
      "ebb: ", what, describePageErrors(errors), ". The gradients of this step are invalid. ",
      remedyOfPageErrors(errors));
  TORCH_CHECK_VALUE(errors == kPagesUsedUp, message);
  throw PageOverflow({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message);
}

c10::Storage Paging::fetch(PageStash& stash, const c10::Storage& living) {
  return telling([&] {
    const Lock lock(mutex_);
    const auto below = belowEverything();
    if (stash.state == State::Back) {
      takeOver(stash);
      return stash.bytes;
    }
    stash.checkPlace();
    backwardBegins(*stash.group);
    step_.noteComeback(stash);
    bring(stash, living);
    checkErrors(stash);
    c10::Storage bytes = stash.bytes;
    noteMade(stash);  // if endFetch() throws, the stash is Back, and may be fetched again
    endFetch(stash);
    return bytes;
  });
}

// Sets `stash.bytes` to the whole storage, for use on the current stream.
void Paging::bring(PageStash& stash, const c10::Storage& living) {
  if (living) {
    giveUp(stash);
    stash.pool.reset();
    stash.bytes = living;
  } else if (stash.state == State::Copied) {
    RECORD_USER_SCOPE("ebb::restore " + stash.group->region);
    takeOver(stash);
    stash.bytes = stash.copyBack();
  } else if (stash.state == State::Resident) {
    takeOver(stash);
  } else {
    takeRestored(stash);
  }
}

c10::Storage Paging::fetchAhead(PageStash& stash, const c10::Storage& living) {
  const Lock lock(mutex_);
  if (!stash.mayComeAhead()) {
    return {};
  }
  bring(stash, living);
  stash.state = State::Ahead;
  stash.made.reset();  // the caller owns the bytes now
  return std::exchange(stash.bytes, c10::Storage());
}

// A group without living stashes fetches nothing, so its backward is not added to the schedule. The
// cast is safe because `cameBack` contains only page stashes (Stash::awaitsBackward).
void Paging::backwardArrives(PageGroup& group, std::vector<c10::intrusive_ptr<Stash>>& cameBack) {
  telling([&] {
    const Lock lock(mutex_);
    const auto below = belowEverything();
    if (!group.stashes.empty()) {
      backwardBegins(group);
    }
    while (!cameBack.empty()) {
      const c10::intrusive_ptr<Stash> last = cameBack.back();
      auto& stash = static_cast<PageStash&>(*last);
      step_.noteComeback(stash);
      checkErrors(stash);
      cameBack.pop_back();
      endFetch(stash);
    }
  });
}

// Releases the rows, and the memory of a restore in progress. Makes no device call: a destructor
// calls this on any thread, even after a device error.
void Paging::giveUp(PageStash& stash) {
  if (stash.pool) {
    stash.pool->free(stash.slot);
    if (stash.made) {
      stash.pool->lane().hold(stash.slot->restored, *stash.made, stash.bytes);
    }
  }
  mutex_.drop(stash.bytes);
}

void Paging::takeRestored(PageStash& stash) {
  stash.checkNotCondemned();
  startRestoring(stash);
  stash.pool->lane().wait(stash.slot->restored);
  noteUse(stash.bytes);
}

// Throws if the restored tensor hides an error of its pool. After an error a floating-point tensor
// comes back as NaN, but integers and masks have no NaN. Throws only if the host can read the error
// without waiting, and not if the step raises at its end and runs again.
void Paging::checkErrors(const PageStash& stash) {
  stash.checkNotCondemned();
  if (step_.raisesLate() && stash.step == step_.number()) {
    return;
  }
  if (const int64_t errors =
          hasNan(stash.kind.dtype) || !stash.pool ? 0 : stash.pool->errorsInSight()) {
    tellOverflow(
        pools_.readErrors() | errors,
        "a tensor that was paged in region '" + stash.group->region + "' cannot be restored: ");
  }
}

// Notes that the current stream made the bytes. Code on another stream must call takeOver() before
// it uses the bytes.
void Paging::noteMade(PageStash& stash) { stash.made = currentStream(stash.kind.device); }

void Paging::takeOver(PageStash& stash) {
  if (stash.made) {
    useOnCurrent(stash.bytes, *stash.made);
  }
}

// Adds the group's backward to the schedule, and starts to restore the next layer's pages.
void Paging::backwardBegins(PageGroup& group) {
  const PageGroupPtr next = step_.backwardBegins(group);
  if (!next) {
    return;
  }
  const bool wanted = settings_.prefetch < 0
                          ? pools_.laneOf(group.stashes.front()->kind.device).isBesideCompute()
                          : settings_.prefetch > 0;
  if (!wanted || outOfMemoryIn_ == step_.number()) {
    return;
  }
  try {
    for (auto stash = next->stashes.rbegin(); stash != next->stashes.rend(); ++stash) {
      startRestoring(**stash);
    }
  } catch (const c10::OutOfMemoryError&) {
    outOfMemoryIn_ = step_.number();  // later fetches restore the rest
  }
}

void Paging::startRestoring(PageStash& stash) {
  if (stash.state == State::Paged && stash.isHere()) {
    RECORD_USER_SCOPE("ebb::restore " + stash.group->region);
    stash.bytes = allocate(stash.nbytes(), stash.kind.device);
    noteMade(stash);
    stash.pool->restore(stash.slot, stash.bytes, stash.fill);
    stash.state = State::Returning;
    stash.pool->letGraphsWait();
  }
}

// The writer still holds the old storage, so dropping the reference under the lock frees nothing.
void Paging::beforeWrite(PageStash& stash) {
  const Lock lock(mutex_);
  if (stash.state == State::Resident) {
    stash.bytes = copyOf(stash.bytes, stash.nbytes());
    noteMade(stash);
  } else if (stash.pool) {
    stash.pool->lane().wait(stash.slot->stashed);  // the rows have left the storage
  }
}

// Marks the stash as back: the engine has nothing more to do for the stash.
void Paging::takeBack(PageStash& stash) {
  stash.state = State::Back;
  stash.pool.reset();
  stash.slot.reset();
  step_.countBack(stash);
  --alive_;
}

// Ends a fetch, and the step if no stash of the step is left.
void Paging::endFetch(PageStash& stash) {
  takeBack(stash);
  if (step_.allIsBack()) {
    pools_.settle();
    if (step_.endUnlessBracketed()) {
      stepEnds();
    }
  }
}

void Paging::forget(PageStash& stash) {
  const Lock lock(mutex_);
  if (stash.state == State::Back) {
    return;
  }
  const TrackedPoolPtr pool = stash.pool;
  const uint64_t capture = pool ? stash.slot->stashed.capture : 0;
  giveUp(stash);
  takeBack(stash);
  step_.endIfDone();
  if (capture != 0 && capture == pool->lane().capture()) {
    pool->settleFreed();  // no other code will do so in this capture
    pool->lane().joinAll(true);
  }
}

void Paging::beginStep(bool fixedOrder, bool raisesLate) {
  const Lock lock(mutex_);
  const auto below = belowEverything();
  TORCH_CHECK(
      !step_.isBracketed(),
      "ebb: a step of paging is already open in this process. Calls of paging.step() and "
      "run_step() cannot be nested or overlap.");
  stepEnds();
  stepBegins();
  step_.openBracket(fixedOrder, raisesLate);
}

void Paging::endStep() {
  const Lock lock(mutex_);
  const auto below = belowEverything();
  step_.closeBracket();
  stepEnds();
}

void Paging::abandonStep() {
  const Lock lock(mutex_);
  step_.abandonBracket();
}

// Errors of dropped pools are kept until the user is told.
void Paging::stepBegins() {
  if (step_.log().recordNext) {
    TORCH_CHECK(
        !pools_.isCapturing(),
        "ebb: a step of paging that sizes the page pools cannot begin during CUDA graph "
        "capture. Run one step with the same shapes before the capture.");
    unreportedErrors_ |= pools_.drop() & ~reportedErrors_;
  }
  reportedErrors_ = 0;
  step_.begin();
}

// Makes the page pools after a recorded step. ebb cannot make pools during a capture; the recorded
// step then ends when the next step begins.
void Paging::stepEnds() {
  if (!step_.log().isComplete() || pools_.isCapturing()) {
    return;
  }
  ++counts_.recordedSteps;
  if (pools_.make(step_.takeNeeds(settings_.pageRows), settings_)) {
    step_.log().isRecording = false;  // pools exist now
  }
}

void Paging::recordNext() {
  const Lock lock(mutex_);
  step_.log().recordNext = true;
}

// Marks the step as invalid, and lets the next step be recorded.
void Paging::noteErrors(int64_t errors) {
  if (reportedErrors_ == 0) {
    ++counts_.overflows;
  }
  reportedErrors_ |= errors;
  step_.log().recordNext = true;
  pools_.growUsedUp();
}

bool Paging::stepOk() {
  const Lock lock(mutex_);
  const auto below = belowEverything();
  TORCH_CHECK(
      !pools_.isCapturing(),
      "ebb: step_ok() cannot wait during CUDA graph capture; use paging.found_inf() instead.");
  const int64_t errors = pools_.readErrors() | std::exchange(unreportedErrors_, 0);
  if (errors == 0 && reportedErrors_ == 0) {
    return true;
  }
  noteErrors(errors);
  TORCH_CHECK(
      (reportedErrors_ & ~kPagesUsedUp) == 0,
      "ebb: paging failed in this step, so its gradients are invalid: ",
      describePageErrors(reportedErrors_),
      ". Check the row counts given to mark_rows, and the order of CUDA graph replays.");
  return false;
}

std::pair<int64_t, int64_t> Paging::errors() {
  const Lock lock(mutex_);
  const auto below = belowEverything();
  const int64_t found = pools_.readErrors() | unreportedErrors_;
  return {found | reportedErrors_, found & ~reportedErrors_};
}

at::Tensor Paging::foundInf(c10::Device device) {
  const Lock lock(mutex_);
  const auto below = belowEverything();
  const auto known = static_cast<double>(reportedErrors_ | unreportedErrors_);
  at::Tensor errors = at::full({}, known, at::TensorOptions(device).dtype(at::kLong));
  pools_.addErrors(errors);
  return errors.ne(0).to(at::kFloat);
}

PagingStats Paging::stats() {
  const Lock lock(mutex_);
  PagingStats now = counts_;
  now.steps = step_.number();
  now.stashes = alive_;
  now.schedule = step_.schedule();
  pools_.addTo(now);
  return now;
}

void Paging::reset() {
  const Lock lock(mutex_);
  TORCH_CHECK(!step_.isBracketed(), "ebb: reset() was called inside a step of paging.");
  const auto below = belowEverything();
  unreportedErrors_ |= pools_.drop() & ~reportedErrors_;
  pools_.clear();
  step_.clear();
  counts_ = {};
}

void configurePaging(const PagingSettings& settings) { Paging::get().configure(settings); }

PagingSettings pagingSettings() { return Paging::get().settings(); }

bool pagingStepOk() { return Paging::get().stepOk(); }

PagingStats pagingStats() { return Paging::get().stats(); }

}  // namespace ebb
