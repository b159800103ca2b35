// What the recorder does with rows that live and rows that do not: see Note [Rows].
#include <algorithm>

#include "graph/op_recording.h"
#include "graph/recorder.h"
#include "residency/away.h"

namespace ebb {

void Recorder::markRows(const at::Tensor& tensor, const at::Tensor& rows) {
  TORCH_CHECK_VALUE(
      isRecordable(tensor) && tensor.dim() >= 1 && (tensor.numel() == 0 || isRowAfterRow(tensor)),
      "ebb: mark_rows needs a tensor whose rows follow each other in a storage of its own; this "
      "one "
      "has shape ",
      tensor.sizes(),
      ", and is a view of a part, in another order, or of a class of its own. Mark what it is a "
      "view of, or a clone of it.");
  std::lock_guard<std::recursive_mutex> lock(graph_->mutex);
  settle();
  const RowCountPtr count = countOf(tensor, rows);
  if (tensor.numel() == 0) {
    return;
  }
  const c10::intrusive_ptr<Value> value = currentValue(tensor);
  const bool wasRead = readers(value) > 2;
  const bool same = value->rows && value->rows->live == count;
  TORCH_CHECK_VALUE(
      !value->rows || same || !wasRead,
      "ebb: mark_rows: this tensor has rows already, of another count, and operators have read it. "
      "Mark it once, before it is used.");
  if (value->paged && !value->rows && wasRead) {
    value->paged = value->offload = false;  // what has read it may have mixed its rows
    counters_->bytesNotPaged += value->nbytes;
  }
  const bool lossy = value->paged || (value->rows && value->rows->lossy);
  value->rows = std::make_unique<Rows>(Rows{count, tensor.size(0), tensor.scalar_type(), lossy});
  value->offload |= value->paged && value->packed == 0 && !value->stash;
}

// An operator that may mix rows is about to read `tensor`. If it has packed it too, its backward
// may do so: the value is then neither paged nor made again, but kept.
void Recorder::needDeadRows(const at::Tensor& tensor) {
  const auto packed = std::find(packedSince_.begin(), packedSince_.end(), storageOf(tensor));
  const auto known = values_.find(storageOf(tensor));
  if (packed == packedSince_.end() || known == values_.end() || !known->second->rows) {
    return;
  }
  Value& value = *known->second;
  const bool whole = value.bytes && (value.isPrivate || !value.recipe);
  if (!value.rows->lossy || whole) {
    return;
  }
  counters_->bytesPaged -= value.stash ? value.nbytes : 0;
  counters_->bytesNotPaged += value.paged ? value.nbytes : 0;
  value.stash.reset();
  value.recipe.reset();
  value.paged = value.offload = value.rows->lossy = value.saved = false;
  value.keep = value.lent = true;
  keep(value, tensor);
  if (value.entry) {
    value.entry->update([](Line& line) {
      line.fate = Fate::Kept;
      line.reason = "an operator that may mix its rows has saved it";
    });
  }
}

// Before the op runs: it may write its arguments, and change what they show.
[[gnu::noinline]] void OpRecording::scanRows() {
  rows_.emplace(op_, arguments());
  for (const Argument& argument : tensors_) {
    const bool read = argument.use != ArgUse::Overwrite && argument.use != ArgUse::Scratch;
    if (argument.tensor->defined() && read) {
      const auto found = recorder_.values_.find(storageOf(*argument.tensor));
      const bool known = found != recorder_.values_.end();
      const Value* value =
          known ? recorder_.current(found->second, *argument.tensor).get() : nullptr;
      rows_->add(*argument.tensor, argument.index, value);
    }
  }
  const bool mixes = op_.rows != RowRule::ShapeOnly && !rows_->keepsApart();
  for (const Argument& argument : tensors_) {
    if (mixes && argument.tensor->defined()) {
      recorder_.needDeadRows(*argument.tensor);
    }
  }
  recorder_.packedSince_.clear();
}

// Tensors for which the same count was given may be read by one operator.
RowCountPtr Recorder::countOf(const at::Tensor& tensor, const at::Tensor& rows) {
  TORCH_CHECK_VALUE(
      rows.layout() == at::kStrided, "ebb: mark_rows takes a dense count; got ", rows.toString());
  const auto count = c10::make_intrusive<RowCount>(tensor, rows);
  count->check(tensor);
  const auto known = std::find_if(rowCounts_.begin(), rowCounts_.end(), [&](const auto& other) {
    return other->isOf(rows, *count);
  });
  if (known != rowCounts_.end()) {
    return *known;
  }
  rowCounts_.push_back(count);
  return count;
}

}  // namespace ebb
