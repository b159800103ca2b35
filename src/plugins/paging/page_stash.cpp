#include "plugins/paging/page_stash.h"

#include <c10/util/StringUtil.h>

#include "memory/bytes.h"
#include "plugins/paging/paging_engine.h"
#include "stream/capture.h"

namespace ebb {
namespace {

PageFill fillFor(const RowFacts& rows) {
  const unsigned char nan = hasNan(rows.dtype) ? 0xFF : 0;
  const DeadRows padding = rows.live->padding;
  const auto kind = padding == DeadRows::None     ? PageDeadRows::Untouched
                    : padding == DeadRows::Repeat ? PageDeadRows::FirstRow
                                                  : PageDeadRows::Filled;
  return {kind, padding == DeadRows::Nan ? nan : static_cast<unsigned char>(0), nan, false};
}

}  // namespace

at::Tensor rowsIn(const c10::Storage& storage, PageRows rows) {
  return bytesOf(storage, rows.count * rows.bytes).view({rows.count, rows.bytes});
}

PageStash::PageStash(const PageSource& source, PageGroupPtr of, uint64_t number)
    : whole{source.rows.total, static_cast<int64_t>(source.storage.nbytes()) / source.rows.total},
      kind{source.storage.device(), source.rows.dtype, whole.bytes},
      fill(fillFor(source.rows)),
      group(std::move(of)),
      op(source.op),
      step(number) {}

// After a device error, every call on the device throws. The destructor ignores the exception; the
// user's next call on the device raises the error.
PageStash::~PageStash() {
  try {
    Paging::get().forget(*this);
  } catch (...) {  // NOLINT(bugprone-empty-catch)
  }
}

bool PageStash::mayComeAhead() const {
  return isHere() && (!pool || (!pool->isCaptured() && pool->errorsInSight() == 0));
}

std::string PageStash::describe() const {
  return c10::str("the output of ", op, " in region '", group->region, "'");
}

void PageStash::checkCount(int64_t live) const {
  TORCH_CHECK_VALUE(
      live >= 0 && live <= whole.count, "ebb: cannot page ", describe(), ": mark_rows was given ",
      live, " valid rows, but the tensor has ", whole.count, " rows.");
}

bool PageStash::isHere() const {
  return pool ? slot->stashed.capture == pool->lane().capture()
              : state != State::Copied || !isCapturing(kind.device);
}

void PageStash::checkPlace() const {
  TORCH_CHECK(
      isHere(), "ebb: cannot restore ", describe(), ": it was paged ",
      pool && slot->stashed.capture != 0 ? "inside a CUDA graph capture and is needed outside of it"
                                         : "before this CUDA graph capture and is needed inside it",
      ". Capture forward and backward together, or give its operator the decision SAVE or "
      "RECOMPUTE.");
}

void PageStash::checkNotCondemned() const {
  const int64_t errors = pool ? pool->flags().condemned : 0;
  TORCH_CHECK(
      errors == 0, "ebb: cannot restore a tensor that was paged in region '", group->region,
      "': its page pool failed in the meantime (", describePageErrors(errors),
      "). Run the forward again.");
}

c10::Storage PageStash::copyBack() const {
  const int64_t live = copied->rows;
  c10::Storage all = allocate(nbytes(), kind.device);
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
