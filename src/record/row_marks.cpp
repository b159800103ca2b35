#include "record/row_marks.h"

#include <algorithm>

#include "graph/recipe.h"
#include "memory/stash.h"
#include "record/notes.h"
#include "record/row_flow.h"
#include "record/sender.h"
#include "record/value_map.h"

namespace ebb {

void RowMarks::clear() {
  counts_.clear();
  packedSince_.clear();
}

void RowMarks::mark(const at::Tensor& tensor, const at::Tensor& rows) {
  TORCH_CHECK_VALUE(
      isRecordable(tensor) && tensor.dim() >= 1 && (tensor.numel() == 0 || isRowAfterRow(tensor)),
      "ebb: mark_rows needs a contiguous tensor that covers its whole storage; this one, of shape ",
      tensor.sizes(),
      ", is a partial view, not contiguous, or a tensor subclass. Mark its base tensor or a "
      "clone.");
  const RowCountPtr count = countOf(tensor, rows);
  if (tensor.numel() == 0) {
    return;
  }
  setRows(*values_.current(tensor), tensor, count);
}

void RowMarks::setRows(Value& value, const at::Tensor& tensor, const RowCountPtr& count) {
  const bool wasRead = value.uses.readers() > 0;
  const bool same = value.rare->rows && value.rare->rows->live == count;
  TORCH_CHECK_VALUE(
      !value.rare->rows || same || !wasRead,
      "ebb: mark_rows: this tensor was already marked with another row count, and operators have "
      "read it since. Mark it once, before it is used.");
  if (value.decision.isPaged() && !value.rare->rows && wasRead) {
    value.decision.undo(/*hasRecipe=*/false);  // earlier readers may have mixed its rows
    context_.counters->bytesNotPaged += value.home.nbytes();
  }
  const bool lossy = value.decision.isPaged() || (value.rare->rows && value.rare->rows->lossy);
  value.rare.set(
      &RareParts::rows,
      std::make_unique<Rows>(Rows{count, tensor.size(0), tensor.scalar_type(), lossy}));
  if (value.decision.isPaged() && value.uses.packed() == 0 && !value.stash()) {
    value.decision.setDue(true);
  }
  noteRows(value);
}

void RowMarks::needDeadRows(const at::Tensor& tensor) {
  const auto packed = std::find(packedSince_.begin(), packedSince_.end(), storageOf(tensor));
  const auto* known = values_.find(tensor);
  if (packed == packedSince_.end() || known == nullptr || !(*known)->rare->rows) {
    return;
  }
  Value& value = **known;
  Entry::update(value.rare->entry, [](Line& line) { line.rows.mixed = true; });
  const bool whole = value.home.bytes() && (value.home.isPrivate() || !value.recipe());
  if (!value.rare->rows->lossy || whole) {
    return;
  }
  context_.counters->bytesPaged -= value.stash() ? value.home.nbytes() : 0;
  context_.counters->bytesNotPaged += value.decision.isPaged() ? value.home.nbytes() : 0;
  value.dropStash();
  value.setRecipe({});
  value.decision.decide(Decision::Save, false);
  value.rare->rows->lossy = false;
  value.uses.letRelyOnBytes();
  sender_.keep(value, tensor);
  Entry::update(value.rare->entry, [](Line& line) {
    line.fate = Fate::Kept;
    line.reason = "an operator that may mix its rows has saved it";
  });
}

RowCountPtr RowMarks::countOf(const at::Tensor& tensor, const at::Tensor& rows) {
  checkCount(tensor, rows);
  const int64_t live = rows.is_cpu() ? liveRows(tensor, rows) : 0;
  const auto known = std::find_if(counts_.begin(), counts_.end(), [&](const RowCountPtr& count) {
    return rows.is_cpu() ? count->is(live) : count->isOf(rows);
  });
  if (known != counts_.end()) {
    return *known;
  }
  return counts_.emplace_back(
      rows.is_cpu() ? c10::make_intrusive<RowCount>(live) : c10::make_intrusive<RowCount>(rows));
}

}  // namespace ebb
