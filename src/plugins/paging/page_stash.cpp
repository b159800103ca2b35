#include "plugins/paging/page_stash.h"

#include <c10/util/StringUtil.h>

#include "memory/bytes.h"
#include "plugins/paging/paging_engine.h"

namespace ebb {

std::string PageSource::describe(const PageGroup& group) const {
  return c10::str("the output of ", op, " in region '", group.region, "'");
}

void PageSource::checkCount(int64_t live, const PageGroup& group) const {
  TORCH_CHECK_VALUE(
      live >= 0 && live <= totalRows, "ebb: cannot page ", describe(group),
      ": ebb.mark_rows was given ", live, " valid rows, but the tensor has ", totalRows, " rows.");
}

PageStash::PageStash(const PageSource& source, PageGroupPtr of, uint64_t number)
    : nbytes(source.storage.nbytes()),
      whole{source.totalRows, static_cast<int64_t>(source.storage.nbytes()) / source.totalRows},
      kind{source.storage.device(), source.dtype, whole.bytes},
      showDeadRows(source.showDeadRows),
      group(std::move(of)),
      step(number) {}

// After a device error, every call on the device throws. The destructor ignores the exception; the
// user's next call on the device raises the error.
PageStash::~PageStash() {
  try {
    Paging::get().forget(*this);
  } catch (...) {  // NOLINT(bugprone-empty-catch)
  }
}

bool PageStash::hasNan() const {
  return c10::isFloatingType(kind.dtype) || c10::isComplexType(kind.dtype);
}

PageFill PageStash::fill(DeadRows deadRows) const {
  const unsigned char nan = hasNan() ? 0xFF : 0;
  if (showDeadRows || deadRows == DeadRows::Nan) {
    return {PageDeadRows::Filled, nan, nan, false};
  }
  if (deadRows == DeadRows::Zero) {
    return {PageDeadRows::Filled, 0, nan, false};
  }
  const bool repeats = deadRows == DeadRows::Repeat;
  return {repeats ? PageDeadRows::FirstRow : PageDeadRows::Untouched, 0, nan, false};
}

bool PageStash::mayComeAhead() const {
  return !pool || (!pool->isCaptured() && pool->errorsInSight() == 0);
}

void PageStash::checkNotCondemned() const {
  const int64_t errors = pool ? pool->flags().condemned : 0;
  TORCH_CHECK(
      errors == 0, "ebb: cannot restore a tensor that was paged in region '", group->region,
      "': its page pool failed in the meantime (", describePageErrors(errors),
      "). Run the forward again.");
}

c10::Storage PageStash::copyBack(PageFill fill) const {
  const int64_t live = copied->rows;
  c10::Storage all = allocate(nbytes, kind.device);
  const at::Tensor to = rowsIn(all, whole);
  to.narrow(0, 0, live).copy_(rowsIn(bytes, {live, whole.bytes}), true);
  const at::Tensor dead = to.narrow(0, live, whole.count - live);
  if (fill.deadRows == PageDeadRows::FirstRow && live > 0) {
    dead.copy_(to.narrow(0, 0, 1).expand_as(dead));
  } else if (fill.deadRows != PageDeadRows::Untouched) {
    dead.fill_(fill.dead);
  }
  return all;
}

c10::Storage PageStash::fetch(const c10::Storage& living) {
  return Paging::get().fetch(*this, living);
}

c10::Storage PageStash::fetchAhead(const c10::Storage& living) {
  return Paging::get().fetchAhead(*this, living);
}

void PageStash::beforeWrite() { Paging::get().beforeWrite(*this); }

}  // namespace ebb
