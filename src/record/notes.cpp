#include "record/notes.h"

#include <algorithm>

#include "graph/recipe.h"
#include "graph/rows.h"
#include "record/value_map.h"
#include "stream/capture.h"

namespace ebb {

namespace {

// Holders of a value from outside, not counting autograd's handles.
RegionHold held(const c10::weak_intrusive_ptr<Value>& weak) {
  const auto value = weak.lock();
  if (!value || !value->bytes) {
    return {};
  }
  auto* storage = value->bytes.unsafeGetStorageImpl();
  const size_t holders = c10::raw::intrusive_ptr::use_count(storage);
  return {storage, holders - std::min<size_t>(holders, value->entry->line()->use.storages)};
}

}  // namespace

[[gnu::cold]] Origin originOf(const Context& context, const std::string& op) {
  JournalNames& names = context.graph->journal->names();
  return {
      names.intern(context.regionName()),
      names.intern(context.decider->module()),
      names.intern(op)};
}

[[gnu::cold]] void noteMade(
    const Context& context,
    Value& value,
    const at::Tensor& tensor,
    const std::string& op,
    const char* reason) {
  Journal& journal = *context.graph->journal;
  Line line;
  line.origin = originOf(context, op);
  line.rule = value.madeHere
                  ? journal.names().ruleThatDecided(context.decider->ruleInWords(value.rule))
                  : nullptr;
  line.reason = reason;
  line.dtype = tensor.scalar_type();
  line.sizes = tensor.sizes();
  line.memory.nbytes = value.nbytes;
  line.memory.address = value.address;
  line.stack = journal.isProfile() ? nullptr : pythonStack();
  value.entry = journal.add(std::move(line));
  noteRows(value);
  if (!value.madeHere) {
    const auto weak = c10::weak_intrusive_ptr<Value>::reclaim_copy(&value);
    journal.watch(*value.entry, [weak] { return held(weak); });
  }
}

[[gnu::cold]] void noteRule(const Context& context, const Value& value) {
  const std::string* rule =
      context.graph->journal->names().ruleThatDecided(context.decider->ruleInWords(value.rule));
  Entry::update(value.entry, [&](Line& line) { line.rule = rule; });
}

[[gnu::cold]] void noteRows(Value& value) {
  if (!value.entry || !value.rows || !value.entry->journal().isProfile() ||
      isCapturing(value.rows->live->kept.device())) {
    return;
  }
  const int64_t live = value.rows->live->keptNow();
  Entry::update(value.entry, [&](Line& line) {
    line.rows.total = value.rows->total;
    line.rows.live = live;
  });
}

bool isReported(const Context& context, const at::Tensor& tensor) {
  const JournalPtr& journal = context.graph->journal;
  return journal &&
         (tensor.grad_fn() != nullptr || (!journal->isProfile() && !tensor.requires_grad()));
}

[[gnu::cold]] void notePacked(Value& value, const at::Tensor& tensor, bool kept) {
  Entry::update(value.entry, [&](Line& line) {
    line.use.packed = true;
    line.use.storages += tensor.grad_fn() != nullptr;
    if (line.fate == Fate::Offloaded || line.fate == Fate::Paged) {
      return;
    }
    if (!value.madeHere) {
      line.fate = Fate::Outside;
    } else {
      line.fate = !kept ? Fate::Recomputed : line.reason != nullptr ? Fate::Kept : Fate::Saved;
    }
  });
}

[[gnu::cold]] void noteSent(
    Value& value, Fate fate, const char* kind, std::string_view of, size_t nbytes) {
  if (!value.entry) {
    return;
  }
  Journal& journal = value.entry->journal();
  Entry::update(value.entry, [&](Line& line) {
    line.fate = fate;
    line.times.sent = journal.now();
  });
  journal.add(kind, std::string(of), journal.now(), nbytes);
}

[[gnu::cold]] void noteCopied(Value& value) {
  Line line;
  Entry::update(value.entry, [&](const Line& of) { line = of; });
  line.fate = Fate::Copied;
  line.reason = "copied before an in-place write, because a replay needs the old contents";
  line.use.packed = false;
  value.entry = value.entry->journal().add(std::move(line));
}

[[gnu::cold]] std::vector<Closing> noteClosing(const ValueMap& values) {
  std::vector<Closing> closing;
  for (const auto& [storage, value] : values.all()) {
    if (value->entry) {
      const bool droppable = static_cast<bool>(escapedStorage(*value));
      closing.push_back(
          {value->entry, c10::weak_intrusive_ptr<Value>(value), value->home, droppable});
    }
  }
  return closing;
}

[[gnu::cold]] void noteClosed(const std::vector<Closing>& closing) {
  for (const Closing& last : closing) {
    const auto value = last.value.lock();
    const bool kept = value && value->bytes;
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
