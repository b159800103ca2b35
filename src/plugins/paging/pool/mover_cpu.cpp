// The operations of a page pool on the CPU: see Note [Page pools]. Only one thread at a time runs a
// call, so the code needs no synchronisation.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "plugins/paging/pool/mover.h"
#include "plugins/paging/pool/plan.h"

namespace ebb {
namespace {

// For each page of a tensor, calls `copy` with the page's rows, the tensor's rows, and their size
// in bytes. If the pool is a stack (isStack), one call copies all rows.
template <class Copy>
void forEachPage(
    const PagePoolState& pool, const PageTicketState& ticket, PagePlan plan, unsigned char* tensor,
    const Copy& copy) {
  const PageTier& tier = pool.tiers[plan.tier];
  if (plan.rows == 0) {
    return;  // a pool without pages has no memory
  }
  if (pool.isStack != 0) {
    copy(tier.rows + ticket.first * pool.rowBytes, tensor, plan.rows * pool.rowBytes);
    return;
  }
  const int64_t pageBytes = pool.pageRows * pool.rowBytes;
  for (int64_t slot = 0; slot < plan.pages; ++slot) {
    const int64_t here = std::min(pool.pageRows, plan.rows - slot * pool.pageRows);
    unsigned char* page = tier.rows + ticket.pages()[slot] * pageBytes;
    copy(page, tensor + slot * pageBytes, here * pool.rowBytes);
  }
}

void fillDeadRows(
    unsigned char* tensor, int64_t alive, int64_t nbytes, int64_t rowBytes, PageFill fill) {
  unsigned char* const dead = tensor + alive;
  const int64_t count = nbytes - alive;
  if (fill.deadRows == PageDeadRows::Untouched || count == 0) {
    return;
  }
  if (fill.deadRows == PageDeadRows::Filled || alive == 0) {
    std::memset(dead, fill.dead, count);
    return;
  }
  std::memcpy(dead, tensor, rowBytes);
  for (int64_t done = rowBytes; done < count; done *= 2) {
    std::memcpy(dead + done, dead, std::min(done, count - done));
  }
}

void listAsFree(PagePoolState& pool, const PageTicketState& ticket, PagePlan plan) {
  PageTier& tier = pool.tiers[plan.tier];
  for (int64_t slot = 0; slot < plan.pages && pool.isStack == 0; ++slot) {
    tier.free[(tier.tail + slot) % tier.capacity] = ticket.pages()[slot];
  }
}

class CpuPageMover final : public PageMover {
 public:
  void stash(
      PagePoolState* pool, PageTicketState* ticket, PageRows whole, const void* source,
      const int64_t* rows, void*) const override {
    const PagePlan plan = planStash(*pool, *ticket, whole.count, *rows);
    for (int64_t slot = 0; slot < plan.pages && plan.errors == 0 && pool->isStack == 0; ++slot) {
      ticket->pages()[slot] = pageToTake(false, pool->tiers[plan.tier], slot);
    }
    finishStash(*pool, *ticket, plan);
    if (plan.errors == 0) {
      auto* tensor = static_cast<unsigned char*>(const_cast<void*>(source));
      forEachPage(*pool, *ticket, plan, tensor, [](void* page, void* at, size_t bytes) {
        std::memcpy(page, at, bytes);
      });
    }
  }

  void restore(
      PagePoolState* pool, PageTicketState* ticket, PageRows whole, void* destination,
      PageFill fill, void*) const override {
    auto* tensor = static_cast<unsigned char*>(destination);
    const int64_t nbytes = whole.count * whole.bytes;
    const PagePlan plan = planRestore(*pool, *ticket);
    if (plan.errors != 0) {
      std::memset(tensor, fill.failed, nbytes);
    } else {
      forEachPage(*pool, *ticket, plan, tensor, [](void* page, void* at, size_t bytes) {
        std::memcpy(at, page, bytes);
      });
      fillDeadRows(tensor, plan.rows * pool->rowBytes, nbytes, pool->rowBytes, fill);
      if (!fill.keepsPages) {
        listAsFree(*pool, *ticket, plan);
      }
    }
    finishRestore(*pool, *ticket, plan, fill.keepsPages);
  }

  void giveBack(PagePoolState* pool, PageTicketState* ticket, void*) const override {
    const PagePlan plan = planGiveBack(*pool, *ticket);
    listAsFree(*pool, *ticket, plan);
    if (plan.pages > 0) {
      finishGiveBack(*pool, *ticket, plan);
    }
  }

  void reset(PagePoolState* pool, void*) const override {
    for (PageTier& tier : pool->tiers) {
      tier.head = 0;
      tier.tail = tier.capacity;
      if (pool->isStack == 0) {
        std::iota(tier.free, tier.free + tier.capacity, int64_t{0});
      }
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
