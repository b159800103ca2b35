#include "record/notes.h"

#include <algorithm>

#include "graph/recipe.h"
#include "graph/rows.h"
#include "kernel/random_state.h"
#include "record/arguments.h"
#include "record/sender.h"
#include "record/value_map.h"
#include "stream/capture.h"
#include "stream/event.h"

namespace ebb {

namespace {

// Returns the storage of a value from outside, and the number of holders without autograd's
// handles.
RegionHold held(const c10::weak_intrusive_ptr<Value>& weak) {
  const auto value = weak.lock();
  if (!value || !value->home.bytes()) {
    return {};
  }
  auto* storage = value->home.bytes().unsafeGetStorageImpl();
  const size_t holders = c10::raw::intrusive_ptr::use_count(storage);
  return {
      storage,
      holders - std::min<size_t>(holders, value->rare->entry->line()->use.handlesWithStorage)};
}

// The current region and module, and the op's name `op`.
[[gnu::cold]] Origin originOf(const Context& context, const std::string& op) {
  JournalNames& names = context.graph->journal->names();
  return {
      names.intern(context.regionName()),
      names.intern(context.decider->module()),
      names.intern(op)};
}

}  // namespace

[[gnu::cold]] void noteMade(
    const Context& context,
    Value& value,
    const at::Tensor& tensor,
    const std::string& op,
    const char* reason) {
  Journal& journal = *context.graph->journal;
  Line line;
  line.origin = originOf(context, op);
  line.rule = value.facts.madeHere
                  ? journal.names().ruleThatDecided(context.decider->ruleInWords(value.facts.rule))
                  : nullptr;
  line.reason = reason;
  line.dtype = tensor.scalar_type();
  line.sizes = tensor.sizes();
  line.memory.nbytes = value.home.nbytes();
  line.memory.address = value.home.address();
  line.use.isActivation = !value.facts.madeHere && isActivation(tensor);
  line.stack = journal.isProfile() ? nullptr : pythonStack();
  value.rare.set(&RareParts::entry, journal.add(std::move(line)));
  noteRows(value);
  if (!value.facts.madeHere && journal.isProfile()) {
    const auto weak = c10::weak_intrusive_ptr<Value>::reclaim_copy(&value);
    journal.watch(*value.rare->entry, [weak] { return held(weak); });
  }
}

[[gnu::cold]] void noteRule(const Context& context, const Value& value) {
  const std::string* rule = context.graph->journal->names().ruleThatDecided(
      context.decider->ruleInWords(value.facts.rule));
  Entry::update(value.rare->entry, [&](Line& line) { line.rule = rule; });
}

[[gnu::cold]] void noteRows(Value& value) {
  if (!value.rare->entry || !value.rare->rows || !value.rare->entry->journal().isProfile() ||
      isCapturing(value.rare->rows->live->kept.device())) {
    return;
  }
  const int64_t live = value.rare->rows->live->keptNow();
  Entry::update(value.rare->entry, [&](Line& line) {
    line.rows.total = value.rare->rows->total;
    line.rows.live = live;
  });
}

[[gnu::cold]] std::unique_ptr<OperatorLine> noteCall(
    const Context& context,
    ValueMap& values,
    const Call& call,
    const Arguments& arguments,
    bool replayable) {
  Journal& journal = *context.graph->journal;
  if (!journal.isProfile()) {
    return nullptr;
  }
  auto note = std::make_unique<OperatorLine>();
  note->origin = originOf(context, call.op.name);
  note->call = context.numberInJournal;
  note->random = mayDraw(call.op, call.arguments);
  note->inplace = !arguments.writes().empty();
  note->replayable = replayable;
  for (const Argument& argument : arguments.tensors()) {
    const bool whole = argument.use == ArgUse::Overwrite && coversStorage(*argument.tensor);
    const bool reads = argument.tensor->defined() && !whole && !Input::isStandIn(argument.use);
    const auto* known = reads ? values.find(*argument.tensor) : nullptr;
    if (known != nullptr && (*known)->rare->entry) {
      note->inputs.push_back((*known)->rare->entry->line());
    }
  }
  for (const Argument& argument : arguments.tensors()) {
    if (argument.tensor->defined() && !note->timer) {
      note->timer = startTimer(argument.flags.device);
    }
  }
  note->start = journal.now();
  return note;
}

[[gnu::cold]] void noteRun(const Journal& journal, OperatorLine& note) {
  note.duration = journal.now() - note.start;
  if (note.timer) {
    note.timer->stop();
  }
}

bool isReported(const Context& context, const at::Tensor& tensor) {
  return context.graph->journal && tensor.grad_fn() != nullptr;
}

[[gnu::cold]] void notePacked(Value& value, const at::Tensor& tensor, bool kept) {
  Entry::update(value.rare->entry, [&](Line& line) {
    line.use.packed = true;
    line.use.handlesWithStorage += tensor.grad_fn() != nullptr;
    if (line.fate == Fate::Offloaded || line.fate == Fate::Paged) {
      return;
    }
    if (!value.facts.madeHere) {
      line.fate = Fate::Outside;
    } else {
      line.fate = !kept ? Fate::Recomputed : line.reason != nullptr ? Fate::Kept : Fate::Saved;
    }
  });
}

[[gnu::cold]] void noteSent(
    Value& value, Fate fate, const char* kind, std::string_view of, size_t nbytes) {
  if (!value.rare->entry) {
    return;
  }
  Journal& journal = value.rare->entry->journal();
  Entry::update(value.rare->entry, [&](Line& line) {
    line.fate = fate;
    line.times.sent = journal.now();
  });
  journal.add(kind, std::string(of), journal.now(), nbytes);
}

[[gnu::cold]] void noteCopied(Value& value) {
  Line line;
  Entry::update(value.rare->entry, [&](const Line& of) { line = of; });
  line.fate = Fate::Copied;
  line.reason = "copied before an in-place write, because a replay needs the old contents";
  line.use.packed = false;
  value.rare.set(&RareParts::entry, value.rare->entry->journal().add(std::move(line)));
}

[[gnu::cold]] std::vector<Closing> noteClosing(const ValueMap& values) {
  std::vector<Closing> closing;
  for (const auto& [storage, value] : values.all()) {
    if (value->rare->entry) {
      const bool droppable = static_cast<bool>(escapedStorage(*value));
      closing.push_back(
          {value->rare->entry,
           c10::weak_intrusive_ptr<Value>(value),
           value->home.storage(),
           droppable});
    }
  }
  return closing;
}

[[gnu::cold]] void noteClosed(const std::vector<Closing>& closing) {
  for (const Closing& last : closing) {
    const auto value = last.value.lock();
    const bool kept = value && value->home.bytes();
    const bool escaped = value && last.droppable;
    const auto home = last.home.lock();
    Entry::update(last.entry, [&](Line& line) {
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
}

}  // namespace ebb
