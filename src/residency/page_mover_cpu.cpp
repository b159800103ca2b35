// See Note [Page pools]. One thread at a time, so each step of the protocol is a line.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "residency/page_mover.h"

namespace ebb {
namespace {

int64_t pagesFor(const PagePoolState& pool, int64_t rows) {
  return (rows + pool.pageRows - 1) / pool.pageRows;
}

bool hasRoom(const PageTier& tier, int64_t pages) {
  return tier.tail - tier.head >= pages;
}

// Calls `copy` with each page of rows and its rows in the tensor, and how many bytes they are.
template <class Copy>
void forEachPage(
    const PagePoolState& pool,
    const PageTier& tier,
    const int64_t* ids,
    int64_t rows,
    unsigned char* tensor,
    const Copy& copy) {
  const int64_t pageBytes = pool.pageRows * pool.rowBytes;
  for (int64_t slot = 0; slot * pool.pageRows < rows; ++slot) {
    const int64_t here = std::min(pool.pageRows, rows - slot * pool.pageRows);
    copy(tier.rows + ids[slot] * pageBytes, tensor + slot * pageBytes, here * pool.rowBytes);
  }
}

int64_t faultOfCount(int64_t alive, int64_t most) {
  if (alive < 0) {
    return kNegativeRows;
  }
  return alive > most ? int64_t{kTooManyRows} : 0;
}

class CpuPageMover final : public PageMover {
 public:
  void stash(
      PagePoolState* poolState,
      PageHandleState* handleState,
      PageRows most,
      const void* source,
      const int64_t* rows,
      void*) const override {
    PagePoolState& pool = *poolState;
    PageHandleState& handle = *handleState;
    const int64_t alive = *rows;
    if (pool.errors != 0) {
      return;
    }
    pool.errors = faultOfCount(alive, most.count);
    const bool live = handle.use == kPageHandleLive && handle.epoch == pool.epoch;
    if (live) {
      pool.errors |= kAlreadyStashed;
    }
    if (pool.errors != 0) {
      return;
    }
    const int64_t pages = pagesFor(pool, alive);
    const int64_t which = hasRoom(pool.tiers[0], pages) ? 0 : 1;
    PageTier& tier = pool.tiers[which];
    if (!hasRoom(tier, pages)) {
      pool.errors |= kPagesUsedUp;
      return;
    }
    for (int64_t slot = 0; slot < pages; ++slot) {
      handle.pages()[slot] = tier.free[(tier.head + slot) % tier.capacity];
    }
    auto* tensor = static_cast<unsigned char*>(const_cast<void*>(source));
    forEachPage(pool, tier, handle.pages(), alive, tensor, [](void* page, void* at, size_t bytes) {
      std::memcpy(page, at, bytes);
    });
    tier.head += pages;
    pool.spilled |= which;
    handle.use = kPageHandleLive;
    handle.rows = alive;
    handle.tier = which;
    handle.epoch = pool.epoch;
  }

  void restore(
      PagePoolState* poolState,
      PageHandleState* handleState,
      PageRows most,
      void* destination,
      PageFill fill,
      void*) const override {
    PagePoolState& pool = *poolState;
    PageHandleState& handle = *handleState;
    auto* tensor = static_cast<unsigned char*>(destination);
    const bool stale = handle.use != kPageHandleEmpty && handle.epoch != pool.epoch;
    if (pool.errors == 0 && stale) {
      pool.errors = kStaleHandle;
    } else if (pool.errors == 0 && handle.use != kPageHandleLive) {
      pool.errors = kNotStashed;
    }
    if (pool.errors != 0) {
      std::memset(tensor, fill.failed, most.count * most.bytes);
      return;
    }
    PageTier& tier = pool.tiers[handle.tier];
    const int64_t* ids = handle.pages();
    forEachPage(pool, tier, ids, handle.rows, tensor, [](void* page, void* at, size_t bytes) {
      std::memcpy(at, page, bytes);
    });
    const int64_t pages = pagesFor(pool, handle.rows);
    for (int64_t slot = 0; slot < pages; ++slot) {
      tier.free[(tier.tail + slot) % tier.capacity] = ids[slot];
    }
    tier.tail += pages;
    handle.use = kPageHandleRestored;
    if (fill.deadRows) {
      const int64_t alive = handle.rows * pool.rowBytes;
      std::memset(tensor + alive, fill.dead, most.count * most.bytes - alive);
    }
  }

  void reset(PagePoolState* pool, void*) const override {
    for (PageTier& tier : pool->tiers) {
      tier.head = 0;
      tier.tail = tier.capacity;
      std::iota(tier.free, tier.free + tier.capacity, int64_t{0});
    }
    pool->errors = 0;
    pool->spilled = 0;
    ++pool->epoch;
  }
};

}  // namespace

const PageMover& cpuPageMover() {
  static const CpuPageMover mover;
  return mover;
}

}  // namespace ebb
