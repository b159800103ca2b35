// The observer that writes a graph's lines into a journal: see Note [The journal].
#include <ATen/core/TensorBody.h>

#include <algorithm>
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
#include "plugins/report/journal.h"
#include "plugins/report/shelf.h"
#include "record/arguments.h"
#include "record/context.h"
#include "record/keeper.h"
#include "record/retention.h"
#include "record/value_map.h"
#include "stores/rows.h"
#include "stream/capture.h"
#include "stream/event.h"

namespace ebb {
namespace {

EntryPtr entryOf(const Value& value) {
  return EntryPtr::reclaim_copy(value.extra<Entry>());
}

// Calls `change` on the value's line, if it has one, under the journal's lock.
template <class Change>
void update(const Value& value, const Change& change) {
  if (const Entry* entry = value.extra<Entry>()) {
    entry->update(change);
  }
}

// Adds the line of `value` to `lines`, if it has one.
template <class Lines>
void addLine(const Value& value, Lines& lines) {
  if (const Entry* entry = value.extra<Entry>()) {
    lines.push_back(entry->line());
  }
}

// Returns the storage of a value from outside, and the number of holders without autograd's
// handles.
RegionHold held(const c10::weak_intrusive_ptr<Value>& weak) {
  const auto value = weak.lock();
  if (!value || !value->home.bytes()) {
    return {};
  }
  auto* storage = value->home.bytes().unsafeGetStorageImpl();
  const size_t holders = c10::raw::intrusive_ptr::use_count(storage);
  const size_t handles = value->extra<Entry>()->line()->use.handlesWithStorage;
  return {storage, holders - std::min(holders, handles)};
}

// Adds the rules that the user wrote. A report lists those that have no effect.
void noteRules(Journal& journal, const Policy& policy) {
  for (const std::string& rule : policy.rulesInWords()) {
    journal.names().addRule(rule);
  }
}

struct RegionSpan final : RegionNote {
  RegionSpan(JournalPtr of, std::string name)
      : journal(std::move(of)), name(std::move(name)), entered(journal->now()) {
  }
  ~RegionSpan() override {
    journal->add("region", name, entered);
  }

  const JournalPtr journal;
  const std::string name;
  const JournalTime entered;
};

// The state of a value before the core releases its references.
struct Closing {
  EntryPtr entry;
  c10::weak_intrusive_ptr<Value> value;
  c10::weak_intrusive_ptr<c10::StorageImpl> home;
  bool droppable;  // escapedStorage() is not null
};

void noteClosed(const Closing& last) {
  const auto value = last.value.lock();
  const bool kept = value && value->home.bytes();
  const bool escaped = value && last.droppable;
  const auto home = last.home.lock();
  last.entry->update([&](Line& line) {
    const bool lives = home && home->nbytes() == line.memory.nbytes;
    if (line.fate == Fate::Recomputed) {
      line.fate = escaped ? Fate::Escaped : line.fate;
    } else if (line.fate != Fate::Unneeded) {
      return;
    } else if (line.rule == nullptr) {
      line.fate = kept ? Fate::Outside : line.fate;
    } else if (kept) {
      line.fate = line.reason != nullptr ? Fate::Kept : Fate::Saved;
    } else if (lives) {
      line.fate = escaped ? Fate::Escaped : Fate::Result;
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
  explicit ForwardReporter(JournalPtr journal)
      : journal_(std::move(journal)), number_(journal_->countRegion()) {
  }

  std::unique_ptr<RegionNote> enters(
      const std::string& name, const std::shared_ptr<const Policy>& policy) override {
    if (journal_->names().isNewPolicy(policy)) {
      noteRules(*journal_, *policy);
    }
    return std::make_unique<RegionSpan>(journal_, name);
  }

  // The report then shows when backward unpacks a tensor that was computed outside of the region.
  bool wantsInput(const at::Tensor& tensor) override {
    return tensor.grad_fn() != nullptr;
  }

  void willRun(
      const Context& context,
      ValueMap& values,
      const Call& call,
      const Arguments& arguments,
      bool replayable) override {
    if (!journal_->isProfile()) {
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
    call_->start = journal_->now();
  }

  void hasRun() override {
    if (call_) {
      call_->duration = journal_->now() - call_->start;
      if (call_->timer) {
        call_->timer->stop();
      }
    }
  }

  void recorded() override {
    if (call_) {
      journal_->add(*std::exchange(call_, std::nullopt));
    }
  }

  // A profile checks later if the program still refers to values from outside.
  void made(const Made& made) override {
    Value& value = made.value;
    JournalNames& names = journal_->names();
    Line line;
    line.origin = originOf(made.context, made.op);
    line.rule = value.facts.madeHere ? names.ruleThatDecided(ruleOf(made.context, value)) : nullptr;
    line.reason = made.whyKept;
    line.dtype = made.tensor.scalar_type();
    line.sizes = made.tensor.sizes();
    line.memory.nbytes = value.home.nbytes();
    line.memory.address = value.home.address();
    line.use.isActivation = !value.facts.madeHere && isActivation(made.tensor);
    line.stack = journal_->isProfile() ? nullptr : pythonStack();
    value.rare.add(journal_->add(std::move(line)));
    extraChanged(value);
    if (!value.facts.madeHere && journal_->isProfile()) {
      const auto weak = c10::weak_intrusive_ptr<Value>::reclaim_copy(&value);
      journal_->watch(*value.extra<Entry>(), [weak] { return held(weak); });
    }
    if (call_) {
      addLine(value, call_->outputs);
    }
  }

  void decidedAgain(const Context& context, Value& value) override {
    const std::string* rule = journal_->names().ruleThatDecided(ruleOf(context, value));
    update(value, [&](Line& line) { line.rule = rule; });
  }

  // Handles keep the former line.
  void copied(Value& value) override {
    Line line;
    update(value, [&](const Line& of) { line = of; });
    line.fate = Fate::Copied;
    line.reason = "copied before an in-place write, because a replay needs the old contents";
    line.use.packed = false;
    value.rare.add(journal_->add(std::move(line)));
  }

  ExtraPtr packed(Value& value, const at::Tensor& tensor, Retention retention) override {
    update(value, [&](Line& line) {
      line.use.packed = true;
      line.use.handlesWithStorage += tensor.grad_fn() != nullptr;
      if (line.fate == Fate::Offloaded || line.fate == Fate::Paged) {
        return;
      }
      if (!value.facts.madeHere) {
        line.fate = Fate::Outside;
      } else if (retention == Retention::Recomputed) {
        line.fate = Fate::Recomputed;
      } else if (retention != Retention::Away) {  // else sent() or stays() has told the fate
        line.fate = line.reason != nullptr ? Fate::Kept : Fate::Saved;
      }
    });
    return entryOf(value);
  }

  void sent(Value& value, const char* kind, const std::string& of, size_t nbytes) override {
    update(value, [&](Line& line) {
      line.fate = std::string_view(kind) == "offload" ? Fate::Offloaded : Fate::Paged;
      line.times.sent = journal_->now();
    });
    journal_->add(kind, of, journal_->now(), nbytes);
  }

  void notSent(Value& value, const char* why) override {
    update(value, [&](Line& line) { line.reason = why; });
  }

  void stays(Value& value, const char* why) override {
    update(value, [&](Line& line) {
      line.fate = why == nullptr ? Fate::Saved : Fate::Kept;
      line.reason = why == nullptr ? line.reason : why;
    });
  }

  // For a profile: how many rows of the value are valid.
  void extraChanged(Value& value) override {
    const Rows* rows = value.extra<Rows>();
    if (rows == nullptr) {
      return;
    }
    update(value, [&](Line& line) { line.rows.mixed |= rows->mixed; });
    if (journal_->isProfile() && !isCapturing(rows->live->kept.device())) {
      const int64_t live = rows->live->keptNow();
      update(value, [&](Line& line) {
        line.rows.total = rows->total;
        line.rows.live = live;
      });
    }
  }

  void closes(const ValueMap& values) override {
    for (const auto& [storage, value] : values.all()) {
      if (const EntryPtr entry = entryOf(*value)) {
        const bool droppable = static_cast<bool>(escapedStorage(*value));
        closing_.push_back(
            {entry, c10::weak_intrusive_ptr<Value>(value), value->home.storage(), droppable});
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
  Origin originOf(const Context& context, const std::string& op) {
    JournalNames& names = journal_->names();
    return {
        names.intern(context.regionName()),
        names.intern(context.decider->module()),
        names.intern(op)};
  }

  static std::string ruleOf(const Context& context, const Value& value) {
    return context.decider->ruleInWords(value.facts.rule);
  }

  void noteArgument(ValueMap& values, const OpTraits& op, const Argument& argument) {
    if (!argument.tensor->defined()) {
      return;
    }
    const auto* known = values.find(*argument.tensor);
    const bool whole = argument.use == ArgUse::Overwrite && coversStorage(*argument.tensor);
    if (known != nullptr && !whole && !Input::isStandIn(argument.use)) {
      addLine(**known, call_->inputs);
    }
    const bool reads = argument.use != ArgUse::Overwrite && argument.use != ArgUse::Scratch;
    call_->readsRows |=
        known != nullptr && reads && (*known)->extra<Rows>() && !op.arguments.readsOnlyShapes;
  }

  const JournalPtr journal_;
  const uint64_t number_;             // of the graph, in the journal
  std::optional<OperatorLine> call_;  // of a profile: the op that runs
  std::vector<Closing> closing_;      // between closes() and closed()
};

// Notes the graph's replays.
class BackwardReporter final : public BackwardEvents {
 public:
  explicit BackwardReporter(JournalPtr journal) : journal_(std::move(journal)) {
  }

  void fetches(Value& value) override {
    fetchBegan_ = journal_->now();
  }

  void fetched(Value& value) override {
    std::string op;
    update(value, [&](Line& line) {
      line.times.back = journal_->now();
      line.memory.backAt = value.home.bytes().data();
      op = *line.origin.op;
    });
    if (!op.empty()) {
      journal_->add("reload", op, fetchBegan_, value.home.nbytes());
    }
  }

  void willReplay(const Recipe& recipe, bool ahead) override {
    replay_ = {.began = journal_->now(), .firstBegan = journal_->now(), .ahead = ahead};
    if (!journal_->isProfile() && !ahead) {
      replay_.timer = timerOnDevice(recipe);
    }
  }

  void hasReplayed() override {
    if (replay_.timer) {
      replay_.timer->stop();
    }
  }

  void replayed(const Graph& graph, const Recipe& recipe, Value& value) override {
    const JournalTime began = std::exchange(replay_.firstBegan, kNever);
    update(value, [&](Line& line) {
      const JournalTime now = journal_->now();
      if (!value.recipe()) {  // else the bytes are soon freed
        line.times.back = now;
        line.memory.backAt = value.home.bytes().data();
      }
      const JournalTime took = began == kNever ? 0 : now - began;
      line.replays.time += took;
      line.replays.timeAhead += replay_.ahead ? took : 0;
      ++line.replays.count;
      line.replays.ahead += replay_.ahead ? 1 : 0;
    });
  }

  void replayEnds(const Recipe& recipe) override {
    journal_->add(replay_.ahead ? "replay ahead" : "replay", recipe.op.name, replay_.began);
    if (journal_->isProfile()) {
      return;
    }
    OperatorLine call;
    call.duration = replay_.ahead ? 0 : journal_->now() - replay_.began;
    call.timer = std::move(replay_.timer);
    for (const Input& input : recipe.inputs()) {
      if (input.value) {
        addLine(*input.value, call.inputs);
      }
    }
    for (const Output& output : recipe.outputs) {
      if (const auto value = output.value.lock()) {
        addLine(*value, call.outputs);
      }
    }
    journal_->add(std::move(call));
  }

  void replaysWith(const Value& asked, const Value& value) override {
    if (asked.extra<Entry>() != nullptr && value.extra<Entry>() != nullptr) {
      journal_->askedWith(*asked.extra<Entry>(), *value.extra<Entry>());
    }
  }

  void counted(const char* what) override {
    journal_->count(what);
  }

 private:
  // A replay in progress.
  struct Replay {
    JournalTime began = 0;
    JournalTime firstBegan = 0;  // kNever once the replay has had a result: the time counts once
    bool ahead = false;
    std::unique_ptr<DeviceTimer> timer{};
  };

  const JournalPtr journal_;
  JournalTime fetchBegan_ = 0;
  Replay replay_;
};

[[maybe_unused]] const bool isRegistered = observeGraphs([](Graph& graph) {
  if (JournalPtr journal = currentJournal()) {
    graph.rules.onlyInBackward |= journal->isProfile();
    graph.observers.add(std::make_unique<ForwardReporter>(journal));
    graph.observers.add(std::make_unique<BackwardReporter>(std::move(journal)));
  }
});
[[maybe_unused]] const bool knowsSteps = callWhenStepBegins(&journalStepBegins);

}  // namespace

const SlotNumber Entry::kSlot = takeSlot();

}  // namespace ebb
