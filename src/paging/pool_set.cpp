#include "paging/pool_set.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace ebb {
namespace {

constexpr double kGrowth = 1.25;  // of a pool that had too little room

int64_t scaled(int64_t count, double by) {
  return static_cast<int64_t>(std::ceil(static_cast<double>(count) * by));
}

int64_t pagesFor(int64_t rows, const PagePoolOptions& options) {
  return (rows + options.pageRows - 1) / options.pageRows;
}

// If the pools of a device want more than the limit, each gets its share of it.
void shareLimit(PagePoolOptions& options, double wantedOfAll, size_t most) {
  const auto limit = static_cast<double>(most);
  if (wantedOfAll > limit) {
    const auto pages = static_cast<double>(options.devicePages);
    options.devicePages = static_cast<int64_t>(pages * (limit / wantedOfAll));
  }
}

void checkTakesLargest(const PagePoolOptions& options, int64_t largestRows, size_t most) {
  const int64_t largest = pagesFor(largestRows, options);
  TORCH_CHECK_VALUE(
      std::max(options.devicePages, options.hostPages) >= largest,
      "ebb: within the device limit of ",
      most,
      " bytes (EBB_PAGING_DEVICE_LIMIT) the page pool for rows of ",
      options.rowBytes,
      " bytes has ",
      options.devicePages,
      " pages of ",
      options.pageRows,
      " rows, and one tensor needs ",
      largest,
      ". Raise the limit, or give the pool a second tier in pinned memory "
      "(EBB_PAGING_HOST_HEADROOM).");
}

}  // namespace

PageLane& PoolSet::laneOf(c10::Device device) {
  const auto index = device.is_cpu() ? c10::DeviceIndex{-1} : device.index();
  return lanes_.try_emplace(index, device, mutex_).first->second;
}

void PoolSet::joinLanes() {
  for (auto& [device, lane] : lanes_) {
    lane.join();
  }
}

TrackedPoolPtr PoolSet::find(const PoolKey& key) const {
  const auto found = pools_.find(key);
  return found == pools_.end() ? nullptr : found->second;
}

// Where all comes back in the reverse order a stack needs no more rows than pages would.
PagePoolOptions PoolSet::sizeOf(
    const PoolKey& key, const PageNeed& need, const PagingSettings& settings) const {
  PagePoolOptions options;
  options.device = key.device;
  options.rowBytes = key.rowBytes;
  const auto grown = grown_.find(key);
  options.isStack = grown == grown_.end() && need.stackRows <= need.pages * settings.pageRows;
  options.pageRows = options.isStack ? 1 : settings.pageRows;
  const int64_t needed = options.isStack ? need.stackRows : need.pages;
  options.devicePages = scaled(needed, settings.headroom);
  options.hostPages = scaled(needed, settings.hostHeadroom);
  if (grown != grown_.end()) {
    options.devicePages = std::max(options.devicePages, pagesFor(grown->second, options));
  }
  return options;
}

void PoolSet::make(PageNeeds needs, const PagingSettings& settings) {
  needs_ = std::move(needs);
  pools_.clear();
  std::map<PoolKey, PagePoolOptions> sizes;
  std::map<PageLane*, double> wanted;  // bytes, of all pools of a device
  for (const auto& [key, need] : needs_) {
    const auto options = sizes[key] = sizeOf(key, need, settings);
    wanted[&laneOf(key.device)] +=
        static_cast<double>(options.devicePages) * options.pageRows * options.rowBytes;
  }
  std::map<PoolKey, TrackedPoolPtr> made;
  for (auto& [key, options] : sizes) {
    PageLane& lane = laneOf(key.device);
    shareLimit(options, wanted[&lane], settings.deviceLimit);
    checkTakesLargest(options, needs_[key].largest, settings.deviceLimit);
    made[key] = std::make_shared<TrackedPool>(options, lane);
  }
  pools_ = std::move(made);
}

int64_t PoolSet::drop() {
  const int64_t errors = readErrors();
  for (auto& [key, pool] : pools_) {
    if (pool->isCaptured()) {
      retired_.push_back(std::move(pool));
    } else {
      pool->condemn();
    }
  }
  pools_.clear();
  for (const TrackedPoolPtr& pool : retired_) {
    pool->reset();
  }
  return errors;
}

void PoolSet::clear() {
  pools_.clear();
  retired_.clear();
  grown_.clear();
  needs_.clear();
  spilledSteps_ = 0;
}

void PoolSet::forEach(const std::function<void(TrackedPool&)>& visit) {
  for (const auto& [key, pool] : pools_) {
    visit(*pool);
  }
  for (const TrackedPoolPtr& pool : retired_) {
    visit(*pool);
  }
}

int64_t PoolSet::readErrors() {
  std::vector<std::pair<TrackedPool*, PageLane::Call>> reading;
  forEach([&](TrackedPool& pool) {
    if (const auto call = pool.startReading()) {
      reading.emplace_back(&pool, *call);
    }
  });
  int64_t errors = 0;
  bool spilled = false;
  for (const auto& [pool, call] : reading) {
    if (call.end) {
      call.end->synchronize();
    }
    const TrackedPool::Flags flags = pool->readFlags();
    errors |= flags.errors;
    spilled |= flags.spilled;
  }
  spilledSteps_ += spilled ? 1 : 0;
  return errors;
}

void PoolSet::growUsedUp() {
  for (const auto& [key, pool] : pools_) {
    const PagePoolOptions& options = pool->options();
    if ((pool->errorsSeen() & kPagesUsedUp) != 0) {
      grown_[key] = scaled(options.devicePages * options.pageRows, kGrowth);
    }
  }
}

void PoolSet::settle() {
  for (const auto& [key, pool] : pools_) {
    pool->settleFreed();
    pool->lane().join();
  }
}

void PoolSet::addErrors(at::Tensor& errors) {
  forEach([&](TrackedPool& pool) {
    if (pool.options().device == errors.device()) {
      pool.lane().join();
      errors.bitwise_or_(pool.pages().flags().select(0, 0));
    }
  });
}

void PoolSet::addTo(PagingStats& stats) const {
  stats.spilledSteps = spilledSteps_;
  for (const auto& [key, need] : needs_) {
    stats.paddedBytes += need.padded * key.rowBytes;
    stats.liveBytes += need.rows * key.rowBytes;
  }
  for (const auto& [key, pool] : pools_) {
    const PagePoolOptions& options = pool->options();
    const PagePool& pages = pool->pages();
    stats.poolBytes += pages.deviceBytes();
    stats.hostPoolBytes += pages.hostBytes();
    stats.pools.push_back(
        {key.device.str(),
         key.dtype,
         key.rowBytes,
         options.pageRows,
         options.devicePages,
         options.hostPages,
         options.isStack,
         pages.deviceBytes()});
  }
}

}  // namespace ebb
