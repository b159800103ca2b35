#include "plugins/paging/pool_set.h"

#include <ATen/ceil_div.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <string>
#include <utility>

#include "stream/capture.h"

namespace ebb {
namespace {

constexpr double kGrowth = 1.25;  // of a pool that overflowed

int64_t scaled(int64_t count, double by) {
  return static_cast<int64_t>(std::ceil(static_cast<double>(count) * by));
}

// Scales a pool down if all pools of its device together need more than the limit.
void shareLimit(PagePoolOptions& options, double wantedOfAll, size_t most) {
  const auto limit = static_cast<double>(most);
  if (wantedOfAll > limit) {
    const auto pages = static_cast<double>(options.devicePages);
    options.devicePages = static_cast<int64_t>(pages * (limit / wantedOfAll));
  }
}

// Called after shareLimit(). A tensor is wholly in one tier: see Note [Page pools].
void checkTakesLargest(const PagePoolOptions& options, int64_t largestRows, size_t limitBytes) {
  const int64_t largest = at::ceil_div(largestRows, options.pageRows);
  TORCH_CHECK_VALUE(
      std::max(options.devicePages, options.hostPages) >= largest,
      "ebb: ebb.config.paging.device_limit, ", limitBytes,
      " bytes, is too small: a tensor with rows of ", options.rowBytes, " bytes needs ", largest,
      " pages of ", options.pageRows, " rows, and its page pool gets ", options.devicePages,
      ". Raise the limit, or give the pool a second tier in pinned memory "
      "(ebb.config.paging.host_headroom).");
}

// Makes a small pool, which moves one row, and throws if that fails. Without this test, a setup
// error would appear only near the end of the first backward.
void tryOut(c10::Device device) {
  std::string why;
  try {
    const PagePool pool({.device = device, .rowBytes = 16, .devicePages = 1});
    return;
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::NotImplementedError&) {
    throw;
  } catch (const c10::Error& error) {
    why = error.what_without_backtrace();
  } catch (const std::exception& error) {
    why = error.what();
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "ebb: PAGE does not work on ", device, ": ", why,
      "\nLikely causes: 1. ebb's kernels were built for other GPUs, or with a CUDA Toolkit that is "
      "newer than the driver: build ebb again with EBB_CUDA=1 on this machine, with a toolkit that "
      "the driver knows. 2. Something failed on the device before. Until then use a policy without "
      "PAGE.");
}

void warnOfNoPool(const c10::Error& error) {
  TORCH_WARN(
      "ebb: could not allocate the page pools, so steps run without them and the host waits for "
      "each tensor. Lower ebb.config.paging.device_limit, or give fewer operators the "
      "decision PAGE. (",
      error.what_without_backtrace(), ")");
}

// Makes a pool. Without enough pinned memory the pool gets no second tier. Returns null if there is
// not enough memory for the pool either. Warns in both cases.
TrackedPoolPtr makePool(PagePoolOptions options, PageLane& lane) {
  try {
    return std::make_shared<TrackedPool>(options, lane);
  } catch (const NoPinnedMemory& error) {
    if (options.hostPages == 0) {
      warnOfNoPool(error);
      return nullptr;
    }
    TORCH_WARN(
        "ebb: could not allocate ", options.hostPages * options.pageRows * options.rowBytes,
        " bytes of pinned memory for the second tier of a page pool, so the pool has no second "
        "tier. Lower ebb.config.paging.host_headroom. (",
        error.what_without_backtrace(), ")");
  } catch (const c10::OutOfMemoryError& error) {
    warnOfNoPool(error);
    return nullptr;
  }
  options.hostPages = 0;
  return makePool(options, lane);
}

}  // namespace

PageLane& PoolSet::laneOf(c10::Device device) {
  const auto index = device.is_cpu() ? c10::DeviceIndex{-1} : device.index();
  const auto found = lanes_.find(index);
  if (found != lanes_.end()) {
    return found->second;
  }
  if (!device.is_cpu() && !ebb::isCapturing(device)) {
    tryOut(device);
  }
  return lanes_.try_emplace(index, device, mutex_).first->second;
}

bool PoolSet::isCapturing() {
  return std::any_of(
      lanes_.begin(), lanes_.end(), [](auto& lane) { return lane.second.capture() != 0; });
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

// Returns the options of a pool. The pool is a stack if a stack needs no more rows than pages do,
// for example if all rows come back in reverse order.
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
    options.devicePages =
        std::max(options.devicePages, at::ceil_div(grown->second, options.pageRows));
  }
  return options;
}

bool PoolSet::make(PageNeeds needs, const PagingSettings& settings) {
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
    if (!(made[key] = makePool(options, lane))) {
      return false;
    }
  }
  pools_ = std::move(made);
  return true;
}

int64_t PoolSet::drop() {
  const int64_t errors = readErrors();
  for (auto& [key, pool] : pools_) {
    if (pool->isCaptured()) {
      retired_.push_back(std::move(pool));
    } else {
      pool->flags().condemned = pool->flags().errors();
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

// Starts to copy the flags of the pools that `which` names to the host: all pools of a device
// together, so that the host waits for one event.
void PoolSet::startReading(const std::function<bool(const TrackedPool&)>& which) {
  for (auto& [device, lane] : lanes_) {
    std::vector<TrackedPool*> reading;
    forEach([&, &lane = lane](TrackedPool& pool) {
      if (&pool.lane() == &lane && which(pool)) {
        pool.startReading();
        reading.push_back(&pool);
      }
    });
    if (!reading.empty()) {
      const PageLane::Call copied = lane.mark();
      for (TrackedPool* pool : reading) {
        pool->flags().reading = copied;
        pool->flags().mayHaveChanged = false;
      }
    }
  }
}

int64_t PoolSet::readErrors() {
  if (isCapturing()) {
    return 0;
  }
  startReading([](const TrackedPool& pool) { return pool.mayHaveChanged(); });
  int64_t errors = 0;
  bool spilled = false;
  EventPtr over;
  forEach([&](TrackedPool& pool) {
    PoolFlags& flags = pool.flags();
    if (!flags.reading) {
      return;
    }
    if (const auto end = flags.reading->end; end && end != over) {
      end->synchronize();
      pool.lane().noteOver(*flags.reading);
      over = end;
    }
    flags.reading.reset();
    // Without an error, the flags stay the same until the next use.
    flags.mayHaveChanged |= flags.errors() != 0;
    errors |= flags.errors();
    spilled |= flags.spilled();
  });
  spilledSteps_ += spilled ? 1 : 0;
  return errors;
}

void PoolSet::growUsedUp() {
  for (const auto& [key, pool] : pools_) {
    const PagePoolOptions& options = pool->options();
    if ((pool->flags().errors() & kPagesUsedUp) != 0) {
      grown_[key] = scaled(options.devicePages * options.pageRows, kGrowth);
    }
  }
}

void PoolSet::settle() {
  std::set<PageLane*> ofGraphs;
  forEach([&](TrackedPool& pool) {
    pool.settleFreed();
    if (pool.isCaptured()) {
      ofGraphs.insert(&pool.lane());
    }
  });
  for (auto& [device, lane] : lanes_) {
    lane.joinAll(ofGraphs.count(&lane) > 0);
  }
  if (!isCapturing()) {
    startReading(
        [](const TrackedPool& pool) { return !pool.isCaptured() && pool.mayHaveChanged(); });
  }
}

void PoolSet::addErrors(at::Tensor& errors) {
  std::vector<TrackedPool*> pools;
  forEach([&](TrackedPool& pool) {
    if (pool.options().device == errors.device()) {
      pools.push_back(&pool);
    }
  });
  const auto add = [&] {
    for (const TrackedPool* pool : pools) {
      errors.bitwise_or_(pool->pages().flags().select(0, 0));
    }
  };
  if (!pools.empty()) {
    PageLane& lane = pools.front()->lane();
    lane.wait(lane.run(add, {errors.storage()}));
  }
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
        {key.device.str(), key.dtype, key.rowBytes, options.pageRows, options.devicePages,
         options.hostPages, options.isStack, pages.deviceBytes()});
  }
}

}  // namespace ebb
