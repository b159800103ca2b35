// Steps of the paging engine: when pools are made, how large, and whether a step was good.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "intercept/key.h"
#include "paging/paging.h"

namespace ebb {
namespace {

constexpr double kMostHeadroom = 1000;
constexpr double kGrowth = 1.25;  // of a pool that had too little room

int64_t scaled(int64_t count, double by) {
  return static_cast<int64_t>(std::ceil(static_cast<double>(count) * by));
}

}  // namespace

void Paging::configure(const PagingSettings& settings) {
  const auto check = [](bool good, const char* what) {
    TORCH_CHECK_VALUE(good, "ebb: paging: ", what);
  };
  check(settings.pageRows >= 1, "a page has at least one row");
  check(settings.headroom >= 1 && settings.headroom <= kMostHeadroom, "headroom is from 1 to 1000");
  check(
      settings.hostHeadroom >= 0 && settings.hostHeadroom <= kMostHeadroom,
      "host_headroom is from 0 to 1000");
  check(
      settings.prefetch >= -1 && settings.prefetch <= 1,
      "prefetch is 0 or 1 layers, or -1 for what suits the device");
  const Lock lock(*this);
  settings_ = settings;
}

PagingSettings Paging::settings() {
  const Lock lock(*this);
  return settings_;
}

void Paging::beginStep(bool fixedOrder) {
  const Lock lock(*this);
  const auto below = belowEverything();
  TORCH_CHECK(
      !bracketed_,
      "ebb: a step of ebb.paging is going on already; steps of one process come one after the "
      "other.");
  stepEnds();
  stepBegins();
  bracketed_ = true;
  if (fixedOrder) {
    schedule_.begin();
  }
}

void Paging::endStep() {
  const Lock lock(*this);
  const auto below = belowEverything();
  bracketed_ = open_ = false;
  try {
    schedule_.end();
  } catch (...) {
    recordNext_ = true;
    throw;
  }
  stepEnds();
}

void Paging::abandonStep() {
  const Lock lock(*this);
  bracketed_ = open_ = false;
  schedule_.abandon();
  recordNext_ |= recording_ || !schedule_.isRecorded();
}

void Paging::stepBegins() {
  if (recordNext_) {
    dropPools();
    recordNext_ = false;
    recording_ = true;
    log_.clear();
  }
  schedule_.restartCounts();
  groups_.clear();
  badStep_ = 0;
  count_ = 0;
  groupsEntered_ = 0;
  open_ = true;
  cameBack_ = false;
  ++stats_.steps;
}

// What pools have to say is kept until the user is told. A CUDA graph that was captured goes on
// using its pools, so they stay.
void Paging::dropPools() {
  untold_ |= readErrors() & ~badStep_;
  for (auto& [key, pool] : pools_) {
    if (pool->captured) {
      retired_.push_back(std::move(pool));
    } else {
      pool->condemned = pool->errorsSeen();
    }
  }
  pools_.clear();
  for (const PoolPtr& pool : retired_) {
    pool->lane.run([&] { pool->pages.reset(); }, {});
    pool->lane.join(dropped_);
    pool->used = false;
  }
}

void Paging::stepEnds() {
  if (!recording_ || log_.isEmpty()) {
    return;
  }
  needs_ = log_.needs(settings_.pageRows, [this](const ScheduleEntry& forward) {
    return schedule_.isTurningPoint(forward);
  });
  ++stats_.recordedSteps;
  log_.clear();
  try {
    makePools();
    recording_ = false;
  } catch (const c10::OutOfMemoryError&) {
    pools_.clear();
    TORCH_WARN(
        "ebb: there is no memory for page pools, so steps run unpaged and the host waits for each "
        "tensor. Lower deviceLimit (EBB_PAGING_DEVICE_LIMIT), or have fewer values paged.");
  }
}

// Where all comes back in the reverse order a stack needs no more rows than pages would.
PagePoolOptions Paging::sizeOf(const PoolKey& key, const PageLog::Need& need) const {
  PagePoolOptions options;
  options.device = key.device;
  options.rowBytes = key.rowBytes;
  const auto grown = grown_.find(key);
  options.isStack = grown == grown_.end() && need.stackRows <= need.pages * settings_.pageRows;
  options.pageRows = options.isStack ? 1 : settings_.pageRows;
  const int64_t needed = options.isStack ? need.stackRows : need.pages;
  options.devicePages = scaled(needed, settings_.headroom);
  options.hostPages = scaled(needed, settings_.hostHeadroom);
  if (grown != grown_.end()) {
    const int64_t pages = (grown->second + options.pageRows - 1) / options.pageRows;
    options.devicePages = std::max(options.devicePages, pages);
  }
  return options;
}

void Paging::makePools() {
  pools_.clear();
  std::map<PoolKey, PagePoolOptions> wanted;
  std::map<PageLane*, double> bytes;  // that the pools of a device want
  for (const auto& [key, need] : needs_) {
    const auto options = wanted[key] = sizeOf(key, need);
    bytes[&laneOf(key.device)] +=
        static_cast<double>(options.devicePages) * options.pageRows * options.rowBytes;
  }
  std::map<PoolKey, PoolPtr> made;
  for (auto& [key, options] : wanted) {
    const auto limit = static_cast<double>(settings_.deviceLimit);
    const double all = bytes[&laneOf(key.device)];
    if (all > limit) {
      const auto pages = static_cast<double>(options.devicePages);
      options.devicePages = static_cast<int64_t>(pages * (limit / all));
    }
    const int64_t largest = (needs_[key].largest + options.pageRows - 1) / options.pageRows;
    TORCH_CHECK_VALUE(
        std::max(options.devicePages, options.hostPages) >= largest,
        "ebb: within the device limit of ",
        settings_.deviceLimit,
        " bytes (EBB_PAGING_DEVICE_LIMIT) the page pool for rows of ",
        key.rowBytes,
        " bytes has ",
        options.devicePages,
        " pages of ",
        options.pageRows,
        " rows, and one tensor needs ",
        largest,
        ". Raise the limit, or give the pool a second tier in pinned memory "
        "(EBB_PAGING_HOST_HEADROOM).");
    made[key] = std::make_shared<Pool>(options, laneOf(key.device));
  }
  pools_ = std::move(made);
}

// Waits for the pools. Those that a CUDA graph has may have been used by it.
int64_t Paging::readErrors() {
  std::vector<std::pair<Pool*, PageLane::Ticket>> read;
  const auto start = [&](const PoolPtr& pool) {
    if (!pool->used && !pool->captured) {
      return;
    }
    if (!pool->seen.defined()) {
      const auto options = at::TensorOptions(at::kLong);
      const bool pinned = !pool->pages.options().device.is_cpu();
      pool->seen = at::empty({2}, options.pinned_memory(pinned));
    }
    read.emplace_back(
        pool.get(), pool->lane.run([&] { pool->seen.copy_(pool->pages.flags(), true); }, {}));
  };
  for (const auto& [key, pool] : pools_) {
    start(pool);
  }
  std::for_each(retired_.begin(), retired_.end(), start);
  int64_t errors = 0;
  bool spilled = false;
  for (const auto& [pool, ticket] : read) {
    if (ticket.end) {
      ticket.end->synchronize();
    }
    const auto* flags = pool->seen.const_data_ptr<int64_t>();
    pool->used = flags[0] != 0;  // else nothing changes until it is used again
    errors |= flags[0];
    spilled |= flags[1] != 0;
  }
  stats_.spilledSteps += spilled ? 1 : 0;
  return errors;
}

void Paging::noteBad(int64_t errors) {
  if (badStep_ == 0) {
    ++stats_.overflows;
  }
  badStep_ |= errors;
  recordNext_ = true;
  for (const auto& [key, pool] : pools_) {
    const auto& options = pool->pages.options();
    if ((pool->errorsSeen() & kPagesUsedUp) != 0) {
      grown_[key] = scaled(options.devicePages * options.pageRows, kGrowth);
    }
  }
}

bool Paging::stepOk() {
  const Lock lock(*this);
  const auto below = belowEverything();
  const int64_t errors = readErrors() | std::exchange(untold_, 0);
  if (errors == 0 && badStep_ == 0) {
    return true;
  }
  noteBad(errors);
  TORCH_CHECK(
      (badStep_ & ~kPagesUsedUp) == 0,
      "ebb: paging went wrong in this step: ",
      describePageErrors(badStep_),
      ". Its gradients are of no use. Check the counts that ebb.mark_rows is given.");
  return false;
}

int64_t Paging::errors() {
  const Lock lock(*this);
  const auto below = belowEverything();
  return readErrors() | badStep_ | untold_;
}

bool Paging::wasTold() {
  const Lock lock(*this);
  const auto below = belowEverything();
  return ((readErrors() | untold_) & ~badStep_) == 0;
}

at::Tensor Paging::foundInf(c10::Device device) {
  const Lock lock(*this);
  const auto below = belowEverything();
  const auto known = static_cast<double>(badStep_ | untold_);
  at::Tensor found = at::full({}, known, at::TensorOptions(device).dtype(at::kLong));
  const auto look = [&](const PoolPtr& pool) {
    if (pool->pages.options().device == device) {
      pool->lane.join(dropped_);
      found.bitwise_or_(pool->pages.flags().select(0, 0));
    }
  };
  for (const auto& [key, pool] : pools_) {
    look(pool);
  }
  std::for_each(retired_.begin(), retired_.end(), look);
  return found.ne(0).to(at::kFloat);
}

PagingStats Paging::stats() {
  const Lock lock(*this);
  PagingStats now = stats_;
  now.stashes = alive_;
  for (const auto& [key, need] : needs_) {
    now.paddedBytes += need.padded * key.rowBytes;
    now.liveBytes += need.rows * key.rowBytes;
  }
  for (const auto& [key, pool] : pools_) {
    const auto& options = pool->pages.options();
    now.poolBytes += pool->pages.deviceBytes();
    now.hostPoolBytes += pool->pages.hostBytes();
    now.pools.push_back(
        {key.device.str(),
         key.dtype,
         key.rowBytes,
         options.pageRows,
         options.devicePages,
         options.hostPages,
         options.isStack,
         pool->pages.deviceBytes()});
  }
  for (const ScheduleEntry& entry : schedule_.recorded()) {
    now.schedule.push_back(schedule_.describe(entry));
  }
  return now;
}

void Paging::reset() {
  const Lock lock(*this);
  TORCH_CHECK(!bracketed_, "ebb: a step of ebb.paging is going on; reset after it.");
  const auto below = belowEverything();
  dropPools();
  retired_.clear();
  grown_.clear();
  needs_.clear();
  log_.clear();
  schedule_.clear();
  groups_.clear();
  recording_ = true;
  recordNext_ = open_ = false;
  count_ = 0;
  const uint64_t steps = stats_.steps + 1;  // what was stashed before belongs to none
  stats_ = {};
  stats_.steps = steps;
}

void Paging::setThrow(void (*throwOverflow)(const std::string& message)) {
  throwOverflow_ = throwOverflow;
}

void Paging::recordNext() {
  const Lock lock(*this);
  recordNext_ = true;
}

void configurePaging(const PagingSettings& settings) {
  Paging::get().configure(settings);
}

PagingSettings pagingSettings() {
  return Paging::get().settings();
}

bool pagingStepOk() {
  return Paging::get().stepOk();
}

PagingStats pagingStats() {
  return Paging::get().stats();
}

}  // namespace ebb
