// The observer that writes a graph's records into a trace: see Note [The trace of a step].
#include <ATen/autocast_mode.h>
#include <ATen/core/TensorBody.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "conditions/random_state.h"
#include "counts/statistics.h"
#include "graph/graph.h"
#include "graph/recipe.h"
#include "hooks/decider.h"
#include "hooks/observer.h"
#include "plugins/report/device_timer.h"
#include "plugins/report/recent_traces.h"
#include "plugins/report/step_trace.h"
#include "record/arguments.h"
#include "record/context.h"
#include "record/keeper.h"
#include "record/retention.h"
#include "record/value_map.h"
#include "stores/rows.h"
#include "stream/capture.h"

namespace ebb {
namespace {

RecordRefPtr recordOf(const Value& value) {
  return RecordRefPtr::reclaim_copy(value.extra<RecordRef>());
}

// Calls `change` on the value's record, if it has one, under the trace's lock.
template <class Change>
void update(const Value& value, const Change& change) {
  if (const RecordRef* reference = value.extra<RecordRef>()) {
    reference->update(change);
  }
}

// Adds the record of `value` to `records`, if it has one.
template <class Lines>
void addRecord(const Value& value, Lines& records) {
  if (const RecordRef* reference = value.extra<RecordRef>()) {
    records.push_back(reference->record());
  }
}

struct RegionSpan final : RegionNote {
  RegionSpan(StepTracePtr of, std::string name)
      : trace(std::move(of)), name(std::move(name)), entered(trace->now()) {}
  ~RegionSpan() override { trace->add("region", name, entered); }

  const StepTracePtr trace;
  const std::string name;
  const TraceTime entered;
};

bool isAutocastOn() {
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return !(c10::autocast_dispatch_keyset - excluded).empty();
}

// True if the op may be autocast's cast of a weight, which autocast's cache keeps until autocast
// ends. The conditions are those of at::autocast::cached_cast(), which runs inside of an autocast
// but with autocast excluded, as under torch.autocast(enabled=False). So the caller must also know
// that autocast was on in the region.
bool mayBeWeightCast(const Call& call, const Arguments& arguments) {
  if (call.op.name != "aten::_to_copy.default" || arguments.tensors().empty() ||
      !at::autocast::is_autocast_cache_enabled()) {
    return false;
  }
  const at::Tensor& weight = *arguments.tensors().front().tensor;
  const auto device = weight.device().type();
  const bool isWeight = weight.scalar_type() == at::kFloat && weight.requires_grad() &&
                        weight.is_leaf() && !weight.is_view();
  if (!isWeight || !at::autocast::is_autocast_available(device) ||
      at::autocast::is_autocast_enabled(device)) {
    return false;
  }
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting() > 0;
}

// The state of a value before the core releases its references.
struct Closing {
  RecordRefPtr reference;
  c10::weak_intrusive_ptr<Value> value;
  c10::weak_intrusive_ptr<c10::StorageImpl> home;
  bool droppable;  // escapedStorage() is not null
  bool autocast;   // autocast was on in the region
};

const char* const kWeightCast = "weight cast by autocast, whose cache keeps it until autocast ends";

// The fate of a value once its region has ended. `kept`: ebb keeps its bytes; `escaped`: the
// program refers to them, and ebb could drop them; `lives`: its memory exists.
Fate fateAtEnd(const ValueRecord& record, bool kept, bool escaped, bool lives) {
  if (record.fate == Fate::Recomputed) {
    return escaped ? Fate::Escaped : record.fate;
  }
  if (record.fate != Fate::Unneeded) {
    return record.fate;
  }
  if (record.rule == nullptr) {
    return kept ? Fate::Outside : record.fate;
  }
  if (kept) {
    return record.reason != nullptr ? Fate::Kept : Fate::Saved;
  }
  if (lives) {
    return escaped ? Fate::Escaped : Fate::Result;
  }
  return record.fate;
}

void noteClosed(const Closing& last) {
  const auto value = last.value.lock();
  const bool kept = value && value->home().bytes();
  const bool escaped = value && last.droppable;
  const auto home = last.home.lock();
  last.reference->update([&](ValueRecord& record) {
    const bool lives = home && home->nbytes() == record.memory.nbytes;
    record.fate = fateAtEnd(record, kept, escaped, lives);
    if (record.fate == Fate::Escaped && record.use.isWeightCast && last.autocast) {
      record.reason = kWeightCast;
    }
  });
}

// A timer on the device of the recipe's inputs. Null if all are on the CPU.
std::unique_ptr<DeviceTimer> timerOnDevice(const Recipe& recipe) {
  std::unique_ptr<DeviceTimer> timer;
  for (const Input& input : recipe.inputs()) {
    if (input.value && !timer) {
      timer = startTimer(input.flags.device);
    }
  }
  return timer;
}

// Notes what the region does.
class ForwardReporter final : public OpEvents, public RegionEvents {
 public:
  explicit ForwardReporter(StepTracePtr trace)
      : trace_(std::move(trace)), number_(trace_->countRegion()) {}

  std::unique_ptr<RegionNote> enters(
      const std::string& name, const std::shared_ptr<const Policy>& policy) override {
    trace_->names().addPolicy(policy);
    noteAutocast();
    return std::make_unique<RegionSpan>(trace_, name);
  }

  // The report then shows when backward unpacks a tensor that was computed outside of the region.
  bool wantsInput(const at::Tensor& tensor) override { return tensor.grad_fn() != nullptr; }

  void willRun(
      const Context& context, ValueMap& values, const Call& call, const Arguments& arguments,
      bool replayable) override {
    noteAutocast();
    castsWeight_ = mayBeWeightCast(call, arguments);
    if (!trace_->isProfile()) {
      return;
    }
    call_.emplace();
    call_->origin = originOf(context, call.op.name);
    call_->call = number_;
    call_->random = mayDraw(call.op, call.arguments);
    call_->inplace = !arguments.writes().empty();
    call_->replayable = replayable;
    for (const Argument& argument : arguments.tensors()) {
      noteArgument(values, call.op, argument);
    }
    for (const Argument& argument : arguments.tensors()) {
      if (argument.tensor->defined() && !call_->timer) {
        call_->timer = startTimer(argument.flags.device);
      }
    }
    call_->start = trace_->now();
  }

  void hasRun() override {
    if (call_) {
      call_->duration = trace_->now() - call_->start;
      if (call_->timer) {
        call_->timer->stop();
      }
    }
  }

  void recorded() override {
    if (call_) {
      trace_->add(*std::exchange(call_, std::nullopt));
    }
  }

  // A profile checks later if the program still refers to values from outside.
  void made(const Made& made) override {
    Value& value = made.value;
    TraceNames& names = trace_->names();
    ValueRecord record;
    record.origin = originOf(made.context, made.op);
    record.rule = value.facts().madeHere
                      ? names.intern(made.context.decider->ruleInWords(made.rule), true)
                      : nullptr;
    record.reason = made.whyKept;
    record.dtype = made.tensor.scalar_type();
    record.sizes = made.tensor.sizes();
    record.memory.nbytes = value.home().nbytes();
    record.memory.address = value.home().address();
    record.use.isActivation = !value.facts().madeHere && isActivation(made.tensor);
    record.use.isWeightCast =
        castsWeight_ && value.facts().madeHere &&
        made.tensor.scalar_type() == at::autocast::get_autocast_dtype(made.tensor.device().type());
    record.stack = trace_->isProfile() ? nullptr
                                       : torch::CapturedTraceback::gather(
                                             /*python=*/true, /*script=*/false, /*cpp=*/false);
    value.attach(trace_->add(std::move(record)));
    extraChanged(value);
    if (!value.facts().madeHere && trace_->isProfile()) {
      trace_->watch(value);
    }
    if (call_) {
      addRecord(value, call_->outputs);
    }
  }

  void decidedAgain(const Context& context, Value& value) override {
    const std::string* rule =
        trace_->names().intern(context.decider->ruleInWords(value.decision().rule()), true);
    update(value, [&](ValueRecord& record) { record.rule = rule; });
  }

  // Handles keep the former record.
  void copied(Value& value) override {
    ValueRecord record;
    update(value, [&](const ValueRecord& of) { record = of; });
    record.fate = Fate::Copied;
    record.reason = "copied before an in-place write, because a replay needs the old contents";
    record.use.packed = false;
    value.attach(trace_->add(std::move(record)));
  }

  void handedOn(Value& before, Value& after) override {
    const RecordRefPtr from = recordOf(before);
    if (RecordRefPtr to = recordOf(after); from && to) {
      from->handOn(std::move(to));
    }
  }

  ExtraPtr packed(Value& value, const at::Tensor& tensor, Retention retention) override {
    update(value, [&](ValueRecord& record) {
      record.use.packed = true;
      record.use.handlesWithStorage += tensor.grad_fn() != nullptr;
      if (record.fate == Fate::Offloaded || record.fate == Fate::Paged) {
        return;
      }
      if (!value.facts().madeHere) {
        record.fate = Fate::Outside;
      } else if (retention == Retention::Recomputed) {
        record.fate = Fate::Recomputed;
      } else if (retention != Retention::Away) {  // else sent() or stays() has told the fate
        record.fate = record.reason != nullptr ? Fate::Kept : Fate::Saved;
      }
    });
    return recordOf(value);
  }

  void sent(Value& value, const char* kind, const std::string& of, size_t nbytes) override {
    update(value, [&](ValueRecord& record) {
      record.fate = std::string_view(kind) == "offload" ? Fate::Offloaded : Fate::Paged;
      record.times.sent = trace_->now();
    });
    trace_->add(kind, of, trace_->now(), nbytes);
  }

  void notSent(Value& value, const char* why) override {
    update(value, [&](ValueRecord& record) { record.reason = why; });
  }

  void stays(Value& value, const char* why) override {
    update(value, [&](ValueRecord& record) {
      record.fate = why == nullptr ? Fate::Saved : Fate::Kept;
      record.reason = why == nullptr ? record.reason : why;
    });
  }

  // For a profile: how many rows of the value are valid.
  void extraChanged(Value& value) override {
    const Rows* rows = value.extra<Rows>();
    if (rows == nullptr) {
      return;
    }
    update(value, [&](ValueRecord& record) { record.rows.mixed |= rows->mixed; });
    if (trace_->isProfile() && !isCapturing(rows->live->kept.device())) {
      const int64_t live = rows->live->keptNow();
      update(value, [&](ValueRecord& record) {
        record.rows.total = rows->total;
        record.rows.live = live;
      });
    }
  }

  void closes(const ValueMap& values) override {
    noteAutocast();
    for (const auto& [storage, value] : values.all()) {
      if (const RecordRefPtr reference = recordOf(*value)) {
        const bool droppable = static_cast<bool>(escapedStorage(*value));
        closing_.push_back(
            {reference, c10::weak_intrusive_ptr<Value>(value), value->home().storage(), droppable,
             sawAutocast_});
      }
    }
  }

  // Before, the recorder kept all values and their recipes alive, so one could not tell which of
  // them backward needs.
  void closed() override {
    for (const Closing& last : std::exchange(closing_, {})) {
      noteClosed(last);
    }
  }

 private:
  // The current region and module, and the op's name `op`.
  MadeBy originOf(const Context& context, const std::string& op) {
    TraceNames& names = trace_->names();
    return {
        names.intern(context.regionName()), names.intern(context.decider->module()),
        names.intern(op)};
  }

  void noteAutocast() { sawAutocast_ = sawAutocast_ || isAutocastOn(); }

  void noteArgument(ValueMap& values, const OpTraits& op, const Argument& argument) {
    if (!argument.tensor->defined()) {
      return;
    }
    const auto* known = values.find(*argument.tensor);
    const bool whole = argument.use == ArgUse::Overwrite && coversStorage(*argument.tensor);
    if (known != nullptr && !whole && !Input::isStandIn(argument.use)) {
      addRecord(**known, call_->inputs);
    }
    const bool reads = argument.use != ArgUse::Overwrite && argument.use != ArgUse::Scratch;
    call_->readsRows |=
        known != nullptr && reads && (*known)->extra<Rows>() && !op.arguments.readsOnlyShapes;
  }

  const StepTracePtr trace_;
  const uint64_t number_;               // of the graph, in the trace
  bool sawAutocast_ = false;            // autocast was on in the region
  bool castsWeight_ = false;            // the op that runs may be autocast's cast of a weight
  std::optional<OperatorRecord> call_;  // of a profile: the op that runs
  std::vector<Closing> closing_;        // between closes() and closed()
};

// Notes the graph's replays.
class BackwardReporter final : public BackwardEvents {
 public:
  explicit BackwardReporter(StepTracePtr trace) : trace_(std::move(trace)) {}

  void fetches(Value& value) override { fetchBegan_ = trace_->now(); }

  void fetched(Value& value) override {
    std::string op;
    update(value, [&](ValueRecord& record) {
      record.times.back = trace_->now();
      record.memory.backAt = value.home().bytes().data();
      op = *record.origin.op;
    });
    if (!op.empty()) {
      trace_->add("reload", op, fetchBegan_, value.home().nbytes());
    }
  }

  void willReplay(const Recipe& recipe, bool ahead) override {
    replay_ = {.began = trace_->now(), .firstBegan = trace_->now(), .ahead = ahead};
    if (!trace_->isProfile() && !ahead) {
      replay_.timer = timerOnDevice(recipe);
    }
  }

  void hasReplayed() override {
    if (replay_.timer) {
      replay_.timer->stop();
    }
  }

  void replayed(const Graph& graph, const Recipe& recipe, Value& value) override {
    const TraceTime began = std::exchange(replay_.firstBegan, kNever);
    update(value, [&](ValueRecord& record) {
      const TraceTime now = trace_->now();
      if (!value.recipe()) {  // else the bytes are soon freed
        record.times.back = now;
        record.memory.backAt = value.home().bytes().data();
      }
      const TraceTime took = began == kNever ? 0 : now - began;
      record.replays.time += took;
      record.replays.timeAhead += replay_.ahead ? took : 0;
      ++record.replays.count;
      record.replays.ahead += replay_.ahead ? 1 : 0;
    });
  }

  void replayEnds(const Recipe& recipe) override {
    trace_->add(replay_.ahead ? "replay ahead" : "replay", recipe.op.name, replay_.began);
    if (trace_->isProfile()) {
      return;
    }
    OperatorRecord call;
    call.duration = replay_.ahead ? 0 : trace_->now() - replay_.began;
    call.timer = std::move(replay_.timer);
    for (const Input& input : recipe.inputs()) {
      if (input.value) {
        addRecord(*input.value, call.inputs);
      }
    }
    for (const Output& output : recipe.outputs) {
      if (const auto value = output.value.lock()) {
        addRecord(*value, call.outputs);
      }
    }
    trace_->add(std::move(call));
  }

  void replaysWith(const Value& asked, const Value& value) override {
    if (const RecordRef* first = asked.extra<RecordRef>()) {
      update(value, [&](ValueRecord& record) {  // the lock is that of both records
        if (record.times.asked == kNever) {
          record.times.asked = first->record()->times.asked;
          record.use.node = first->record()->use.node;
        }
      });
    }
  }

  void counted(const char* what) override { trace_->count(what); }

 private:
  // A replay in progress.
  struct Replay {
    TraceTime began = 0;
    TraceTime firstBegan = 0;  // kNever once the replay has had a result: the time counts once
    bool ahead = false;
    std::unique_ptr<DeviceTimer> timer{};
  };

  const StepTracePtr trace_;
  TraceTime fetchBegan_ = 0;
  Replay replay_;
};

[[maybe_unused]] const bool isRegistered = observeGraphs([](Graph& graph) {
  if (StepTracePtr trace = currentTrace()) {
    graph.rules.onlyInBackward |= trace->isProfile();
    graph.observers.add(std::make_unique<ForwardReporter>(trace));
    graph.observers.add(std::make_unique<BackwardReporter>(std::move(trace)));
  }
});
[[maybe_unused]] const bool knowsSteps = callWhenStepBegins(&traceStepBegins);

}  // namespace

const SlotNumber RecordRef::kSlot = takeSlot();

}  // namespace ebb
