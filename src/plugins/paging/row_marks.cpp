#include "plugins/paging/row_marks.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

#include "graph/recipe.h"
#include "hooks/store.h"
#include "memory/bytes.h"
#include "plugins/paging/paging_engine.h"
#include "record/arguments.h"
#include "record/keeper.h"
#include "record/value_map.h"

namespace ebb {
namespace {

bool isPaged(const Value& value) { return value.decision().chosen() == Decision::Page; }

}  // namespace

// See Note [Dead rows]
c10::Storage NodeRows::shown(Unpacked unpacked) {
  if (!pads() || !rows.live->isPaged) {
    return std::move(unpacked.bytes);
  }
  Value* value = unpacked.value;
  const bool isCurrent = value != nullptr && !value->home().isOverwritten();
  Rows* known = isCurrent ? value->extra<Rows>() : nullptr;
  if (known != nullptr && known->padded) {
    return std::move(unpacked.bytes);
  }
  // A kernel of another stream may still read the bytes.
  const Graph& graph = unpacked.graph;
  const bool mayBeRead = graph.rules.compareAll || graph.streams.areSeveral();
  if (known != nullptr && !mayBeRead && unpacked.onlyOurs) {
    known->padded = true;
    writePadding(unpacked.bytes, rows);
    return std::move(unpacked.bytes);
  }
  c10::Storage copy = copyOf(unpacked.bytes);
  writePadding(copy, rows);
  return copy;
}

// Called before the op writes its arguments or changes their geometry.
void RowMarks::willRun(
    const Context& context, ValueMap& values, const Call& call, const Arguments& arguments,
    bool replayable) {
  if (counts_.empty()) {
    return;
  }
  flow_.emplace(call.op, call.arguments);
  for (const Argument& argument : arguments.tensors()) {
    const bool read = argument.use != ArgUse::Overwrite && argument.use != ArgUse::Scratch;
    if (argument.tensor->defined() && read) {
      auto* known = values_.find(*argument.tensor);
      const Value* value = known ? values_.current(*known, *argument.tensor).get() : nullptr;
      flow_->add(*argument.tensor, argument.index, value);
    }
  }
  const bool mixes = !call.op.arguments.readsOnlyShapes && !flow_->keepsApart();
  for (const Argument& argument : arguments.tensors()) {
    if (mixes && argument.tensor->defined()) {
      needDeadRows(*argument.tensor);
    }
  }
  opBegins(call.op, mixes);
}

const char* RowMarks::whyNotReplayed(const NewState& state) {
  if (!flow_) {
    return nullptr;
  }
  RowsPtr rows =
      state.before ? flow_->ofWritten(state.tensor, *state.before) : flow_->of(state.tensor);
  const Rows* before = state.before ? state.before->extra<Rows>() : nullptr;
  const bool wasLossy = !state.whole && before != nullptr && before->lossy;
  if (rows) {
    rows->lossy |= wasLossy;
    state.value.attach(std::move(rows));
    return nullptr;
  }
  return flow_->isLossy() || wasLossy
             ? "its operator reads paged rows, and may mix valid rows with padding"
             : nullptr;
}

// The decision on the value is known now.
void RowMarks::made(const Made& made) { decidedAgain(context_, made.value); }

void RowMarks::decidedAgain(const Context& context, Value& value) {
  if (Rows* rows = value.extra<Rows>()) {
    rows->lossy |= isPaged(value);
  }
}

void RowMarks::left(const c10::intrusive_ptr<Graph>& graph) {
  counts_.clear();
  packedSince_.clear();
  node_ = {};
  flow_.reset();
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
  const Rows* known = value.extra<Rows>();
  const bool wasRead = value.uses().readers() > 0;
  TORCH_CHECK_VALUE(
      known == nullptr || known->live == count || !wasRead,
      "ebb: mark_rows: this tensor was already marked with another row count, and operators have "
      "read it since. Mark it once, before it is used.");
  if (isPaged(value) && known == nullptr && wasRead) {
    value.decide(value.decision().withoutStore(false));  // earlier readers may have mixed its rows
    context_.counters->bytesNotPaged += value.home().nbytes();
  }
  const bool lossy = isPaged(value) || (known != nullptr && known->lossy);
  const bool pads = known != nullptr && known->pads;
  value.attach(
      c10::make_intrusive<Rows>(
          RowFacts{count, tensor.size(0), tensor.scalar_type(), lossy, pads}));
  if (isPaged(value) && value.uses().packed() == 0 && !value.stash()) {
    value.decide(value.decision().withDue(true));
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

// Returns the rows that the tensor's autograd node has saved.
ExtraPtr RowMarks::packed(Value& value, const at::Tensor& tensor, Retention retention) {
  if (counts_.empty()) {
    return {};
  }
  const Rows* rows = value.extra<Rows>();
  const uint64_t number = at::sequence_number::peek();
  if (rows == nullptr) {
    if (node_.hasRun && isNode(number, tensor)) {
      keepNode();
    }
    return {};
  }
  packedSince_.push_back(storageOf(tensor));
  if (rowsShown(tensor, *rows, value.home().nbytes()) == 0) {
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

void RowMarks::addToNode(Value& value) {
  const bool isNew = std::none_of(node_.values.begin(), node_.values.end(), [&](const auto& known) {
    return known._unsafe_get_target() == &value;
  });
  if (isNew) {
    node_.values.emplace_back(c10::intrusive_ptr<Value>::reclaim_copy(&value));
  }
  node_.rows->several = node_.values.size() > 1;
  node_.rows->rows.lossy |= value.extra<Rows>()->lossy;
  if (node_.rows->pads()) {
    for (const auto& weak : node_.values) {
      if (const auto known = weak.lock()) {
        known->extra<Rows>()->pads = true;
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
    if (const auto storage = value ? value->home().living() : c10::Storage()) {
      keepWhole(*value, bytesOf(storage));
    }
  }
}

void RowMarks::needDeadRows(const at::Tensor& tensor) {
  const auto packed = std::find(packedSince_.begin(), packedSince_.end(), storageOf(tensor));
  const auto* known = values_.find(tensor);
  if (packed == packedSince_.end() || known == nullptr || !(*known)->extra<Rows>()) {
    return;
  }
  keepWhole(**known, tensor);
}

void RowMarks::keepWhole(Value& value, const at::Tensor& tensor) {
  value.extra<Rows>()->mixed = true;
  context_.graph->observers.tell(&OpEvents::extraChanged, value);
  const bool whole = value.home().bytes() && (value.home().isPrivate() || !value.recipe());
  if (!value.extra<Rows>()->lossy || whole) {
    return;
  }
  context_.counters->bytesPaged -= value.stash() ? value.home().nbytes() : 0;
  context_.counters->bytesNotPaged += isPaged(value) ? value.home().nbytes() : 0;
  value.extra<Rows>()->lossy = false;
  value.restore(tensor.storage(), false);
  value.decide(ValueDecision(Decision::Save, false, value.decision().rule()));
  values_.keeper().keep(value, tensor, true);
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
