#include "record/row_marks.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

#include "graph/recipe.h"
#include "memory/bytes.h"
#include "memory/stash.h"
#include "paging/paging_engine.h"
#include "record/row_flow.h"
#include "record/sender.h"
#include "record/value_map.h"

namespace ebb {

void RowMarks::clear() {
  counts_.clear();
  packedSince_.clear();
  node_ = {};
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
  const bool pads = value.rare->rows && value.rare->rows->pads;
  value.rare.set(
      &RareParts::rows,
      std::make_unique<Rows>(Rows{count, tensor.size(0), tensor.scalar_type(), lossy, pads}));
  if (value.decision.isPaged() && value.uses.packed() == 0 && !value.stash()) {
    value.decision.setDue(true);
  }
  context_.graph->observers.tell(&OpEvents::extraChanged, value);
}

bool RowMarks::isNode(uint64_t number, const at::Tensor& tensor) const {
  if (!node_.rows || number == node_.number) {
    return node_.rows.defined();
  }
  if (node_.hasRun) {
    return node_.hasWritten && tensor.is_view();
  }
  return node_.hasCloned && tensor.grad_fn() && tensor.grad_fn()->sequence_nr() + 1 == number;
}

NodeRowsPtr RowMarks::packed(const c10::intrusive_ptr<Value>& value, const at::Tensor& tensor) {
  const Rows* rows = value->rare->rows.get();
  const uint64_t number = at::sequence_number::peek();
  if (rows == nullptr) {
    if (node_.hasRun && isNode(number, tensor)) {
      keepNode();
    }
    return {};
  }
  packedSince_.push_back(storageOf(tensor));
  if (rowsShown(tensor, *rows, value->home.nbytes()) == 0) {
    return {};
  }
  const bool isNext = isNode(number, tensor) && node_.rows->rows.live == rows->live &&
                      node_.rows->rows.total == rows->total;
  if (!isNext) {
    node_ = {};
    node_.rows = c10::make_intrusive<NodeRows>(*rows);
  }
  node_.number = number;
  node_.hasCloned = false;
  addToNode(value);
  return node_.rows;
}

void RowMarks::addToNode(const c10::intrusive_ptr<Value>& value) {
  const bool isNew = std::none_of(node_.values.begin(), node_.values.end(), [&](const auto& known) {
    return known._unsafe_get_target() == value.get();
  });
  if (isNew) {
    node_.values.emplace_back(value);
  }
  node_.rows->several = node_.values.size() > 1;
  node_.rows->rows.lossy |= value->rare->rows->lossy;
  if (node_.rows->pads()) {
    for (const auto& weak : node_.values) {
      if (const auto known = weak.lock()) {
        known->rare->rows->pads = true;
      }
    }
  }
}

void RowMarks::opBegins(const OpTraits& op, bool mixes) {
  if (op.op.schema().name() == "aten::clone") {
    node_.hasCloned = true;
    return;
  }
  packedSince_.clear();
  if (node_.hasRun) {
    node_ = {};
  } else if (node_.rows) {
    node_.hasRun = true;
    node_.hasWritten = op.arguments.writes;
    node_.rows->mixes = mixes && node_.number == at::sequence_number::peek();
  }
}

// The node saves a result without known rows, whose padding rows are the forward's. So all its
// values keep theirs.
[[gnu::cold]] void RowMarks::keepNode() {
  node_.rows->mixes = true;
  for (const auto& weak : node_.values) {
    const auto value = weak.lock();
    if (const auto storage = value ? value->home.living() : c10::Storage()) {
      keepWhole(*value, bytesOf(storage));
    }
  }
}

void RowMarks::needDeadRows(const at::Tensor& tensor) {
  const auto packed = std::find(packedSince_.begin(), packedSince_.end(), storageOf(tensor));
  const auto* known = values_.find(tensor);
  if (packed == packedSince_.end() || known == nullptr || !(*known)->rare->rows) {
    return;
  }
  keepWhole(**known, tensor);
}

void RowMarks::keepWhole(Value& value, const at::Tensor& tensor) {
  value.rare->rows->mixed = true;
  context_.graph->observers.tell(&OpEvents::extraChanged, value);
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
  context_.graph->observers.tell(
      &OpEvents::stays, value, "an operator that may mix its rows has saved it");
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
  auto count =
      rows.is_cpu() ? c10::make_intrusive<RowCount>(live) : c10::make_intrusive<RowCount>(rows);
  const bool shows = context_.graph->rules.raiseIfDifferent;
  count->padding = shows ? DeadRows::Nan : Paging::get().settings().deadRows;
  return counts_.emplace_back(std::move(count));
}

}  // namespace ebb
