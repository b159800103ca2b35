// Plans the calls on a page pool, and updates the pool's state after a call's copies. The CPU and
// kernels share this code; only the copies differ. See Note [Page pools].
#pragma once

#include "plugins/paging/pool/layout.h"

namespace ebb {

struct PagePlan {
  int64_t errors;  // bits, see layout.h; if not 0, nothing is moved
  int64_t rows;
  int64_t pages;
  int64_t tier;
};

EBB_DEVICE_TOO int64_t pagesFor(const PagePoolState& pool, int64_t rows) {
  return (rows + pool.pageRows - 1) / pool.pageRows;
}

EBB_DEVICE_TOO bool hasRoom(const PageTier& tier, int64_t pages) {
  return tier.tail - tier.head >= pages;
}

EBB_DEVICE_TOO PagePlan planStash(
    const PagePoolState& pool, const PageTicketState& ticket, int64_t totalRows, int64_t rows) {
  PagePlan plan{pool.errors, rows, 0, 0};
  if (plan.errors != 0) {
    return plan;
  }
  plan.errors |= rows < 0 ? kNegativeRows : rows > totalRows ? kTooManyRows : 0;
  const bool holdsPages = ticket.use == kPageTicketLive || ticket.use == kPageTicketRestored;
  plan.errors |= holdsPages && ticket.epoch == pool.epoch ? kAlreadyStashed : 0;
  if (plan.errors != 0) {
    return plan;
  }
  plan.pages = pagesFor(pool, rows);
  plan.tier = hasRoom(pool.tiers[0], plan.pages) ? 0 : 1;
  plan.errors |= hasRoom(pool.tiers[plan.tier], plan.pages) ? 0 : kPagesUsedUp;
  return plan;
}

EBB_DEVICE_TOO PagePlan planRestore(const PagePoolState& pool, const PageTicketState& ticket) {
  PagePlan plan{pool.errors, ticket.rows, 0, ticket.tier};
  if (plan.errors == 0) {
    const bool stale = ticket.use != kPageTicketEmpty && ticket.epoch != pool.epoch;
    plan.errors = stale ? kStaleTicket : ticket.use != kPageTicketLive ? kNotStashed : 0;
  }
  plan.pages = plan.errors == 0 ? pagesFor(pool, plan.rows) : 0;
  return plan;
}

// The tensor need not have been restored: a graph may be dropped without a backward. After an error
// or a reset there is nothing to give back.
EBB_DEVICE_TOO PagePlan planGiveBack(const PagePoolState& pool, const PageTicketState& ticket) {
  const bool holdsPages = ticket.use == kPageTicketLive || ticket.use == kPageTicketRestored;
  const bool ours = pool.errors == 0 && holdsPages && ticket.epoch == pool.epoch;
  return {pool.errors, ticket.rows, ours ? pagesFor(pool, ticket.rows) : 0, ticket.tier};
}

// The id of the free page that a stash takes as the tensor's page number `slot`.
EBB_DEVICE_TOO int64_t pageToTake(bool isStack, const PageTier& tier, int64_t slot) {
  return isStack ? tier.head + slot : tier.free[(tier.head + slot) % tier.capacity];
}

// The id of a stashed tensor's page number `slot`.
EBB_DEVICE_TOO int64_t pageTaken(bool isStack, const PageTicketState& ticket, int64_t slot) {
  return isStack ? ticket.first + slot : ticket.pages()[slot];
}

// Ends a stash, after rows and ids are in place.
EBB_DEVICE_TOO void finishStash(PagePoolState& pool, PageTicketState& ticket, PagePlan plan) {
  pool.errors = plan.errors;
  if (plan.errors == 0) {
    PageTier& tier = pool.tiers[plan.tier];
    ticket.use = kPageTicketLive;
    ticket.rows = plan.rows;
    ticket.tier = plan.tier;
    ticket.epoch = pool.epoch;
    ticket.first = tier.head;
    tier.head += plan.pages;
    pool.spilled |= plan.tier;
  }
}

// Gives pages back, after their ids are in the queue.
EBB_DEVICE_TOO void finishGiveBack(PagePoolState& pool, PageTicketState& ticket, PagePlan plan) {
  if (plan.errors == 0) {
    PageTier& tier = pool.tiers[plan.tier];
    if (pool.isStack == 0) {
      tier.tail += plan.pages;
    } else if (plan.pages > 0) {
      tier.head = ticket.first;
    }
    ticket.use = kPageTicketGone;
  }
}

// Ends a restore.
EBB_DEVICE_TOO void finishRestore(
    PagePoolState& pool, PageTicketState& ticket, PagePlan plan, bool keepsPages) {
  pool.errors = plan.errors;
  if (keepsPages) {
    ticket.use = plan.errors == 0 ? kPageTicketRestored : ticket.use;
  } else {
    finishGiveBack(pool, ticket, plan);
  }
}

}  // namespace ebb
