#include "plugins/report/step_trace.h"

#include <c10/util/ApproximateClock.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/profiler/combined_traceback.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <string_view>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "graph/value.h"
#include "hooks/decider.h"
#include "plugins/report/input_records.h"
#include "plugins/report/timeline.h"

namespace ebb {
namespace {

std::atomic<int64_t> liveTraces{0};

constexpr size_t kMostSpans = 1'000'000;  // in one step

const std::vector<std::string> kNoFrames;
const char* const kOnlyHere = "made outside of the region, and needed by its backward";
const char* const kHandedOn = "needed by another region's backward";

// The name of each Fate, in the order of the enum.
constexpr std::array kFates{"unneeded", "saved",   "kept",   "recomputed", "offloaded",
                            "paged",    "escaped", "result", "copied",     "outside"};
static_assert(kFates.size() == static_cast<size_t>(Fate::Outside) + 1);

const char* nameOf(Fate fate) { return kFates[static_cast<size_t>(fate)]; }

double inSeconds(TraceTime time) { return static_cast<double>(time) * 1e-9; }

std::string textOf(const std::string* text) { return text == nullptr ? "" : *text; }

}  // namespace

RecordRef::~RecordRef() {
  decltype(StepTrace::watched_)::node_type watched;  // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(trace_->mutex_);
  watched = trace_->watched_.extract(&record_);
  record_.times.ended = trace_->now();
  if (record_.fate == Fate::Unneeded && record_.replays.count == 0 && !record_.use.wasRead &&
      !trace_->isProfile()) {
    trace_->records_.remove(record_);
  }
}

void RecordRef::handOn(c10::intrusive_ptr<RecordRef> later) {
  later->update([](ValueRecord& record) {
    record.fate = Fate::Recomputed;
    record.use.packed = true;
  });
  update([](ValueRecord& record) {
    record.fate = Fate::Unneeded;
    record.use.packed = false;
  });
  later_ = std::move(later);
}

void RecordRef::unpacks(uint32_t node) {
  if (later_) {
    later_->unpacks(node);
    return;
  }
  const TraceTime time = trace_->now();
  if (trace_->isProfile() && !trace_->wasAsked_.exchange(true)) {
    trace_->look(time);
  }
  update([&](ValueRecord& record) {
    if (record.times.asked == kNever) {
      record.times.asked = time;
      record.use.node = node;
    }
  });
}

const std::string* TraceNames::intern(const std::string& text, bool hasDecided) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = strings_.try_emplace(text).first;
  known->second |= hasDecided;
  return &known->first;
}

void TraceNames::addPolicy(const std::shared_ptr<const Policy>& policy) {
  std::lock_guard<std::mutex> lock(mutex_);
  const bool isLast = !policies_.empty() && policies_.back() == policy;  // the usual case
  if (!isLast && std::find(policies_.begin(), policies_.end(), policy) == policies_.end()) {
    policies_.push_back(policy);
  }
}

std::vector<std::string> TraceNames::idleRules() const {
  std::vector<std::string> idle;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& policy : policies_) {
    for (std::string& rule : policy->rulesInWords()) {
      const auto known = strings_.find(rule);
      const bool hasDecided = known != strings_.end() && known->second;
      if (!hasDecided && std::find(idle.begin(), idle.end(), rule) == idle.end()) {
        idle.push_back(std::move(rule));
      }
    }
  }
  return idle;
}

ValueRecord& Lines::add(ValueRecord record) {
  if (unused_.empty()) {
    return all_.emplace_back(std::move(record));
  }
  ValueRecord& place = *unused_.back();
  unused_.pop_back();
  return place = std::move(record);
}

StepTrace::StepTrace(uint64_t step, For what) : step_(step), what_(what), start_(c10::getTime()) {
  ++liveTraces;
}

StepTrace::~StepTrace() { --liveTraces; }

int64_t StepTrace::live() { return liveTraces; }

TraceTime StepTrace::now() const { return c10::getTime() - start_; }

RecordRefPtr StepTrace::add(ValueRecord record) {
  record.times.made = now();
  std::lock_guard<std::mutex> lock(mutex_);
  return c10::make_intrusive<RecordRef>(shared_from_this(), records_.add(std::move(record)));
}

void StepTrace::add(const char* kind, const std::string& name, TraceTime start, size_t nbytes) {
  const double seconds = inSeconds(now() - start);
  const uint64_t thread = std::hash<std::thread::id>()(std::this_thread::get_id());
  std::lock_guard<std::mutex> lock(mutex_);
  if (spans_.size() < kMostSpans) {  // a step without a backward may be endless
    spans_.push_back({kind, name, inSeconds(start), seconds, thread, nbytes});
  }
}

uint64_t StepTrace::countRegion() {
  if (isProfile()) {
    look(now());
  }
  return regions_++;
}

void StepTrace::watch(Value& value) {
  auto weak = c10::weak_intrusive_ptr<Value>::reclaim_copy(&value);
  std::lock_guard<std::mutex> lock(mutex_);
  watched_.emplace(value.extra<RecordRef>()->record(), std::move(weak));
}

namespace {

// The storage of a value from outside, and the number of its holders without autograd's handles.
// Null if the value is gone or has no bytes.
std::pair<const c10::StorageImpl*, size_t> heldBy(const c10::weak_intrusive_ptr<Value>& weak) {
  const auto value = weak.lock();
  if (!value || !value->home().bytes()) {
    return {};
  }
  auto* storage = value->home().bytes().unsafeGetStorageImpl();
  const size_t holders = c10::raw::intrusive_ptr::use_count(storage);
  const size_t handles = value->extra<RecordRef>()->record()->use.handlesWithStorage;
  return {storage, holders - std::min(holders, handles)};
}

}  // namespace

// Finds watched values that only regions hold, and notes the time. Called without the lock, since
// this function may drop the last reference to a value or to its bytes.
void StepTrace::look(TraceTime now) {
  std::vector<std::pair<ValueRecord*, c10::weak_intrusive_ptr<Value>>> watched;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    watched.assign(watched_.begin(), watched_.end());
  }
  std::vector<std::pair<const c10::StorageImpl*, size_t>> seen;
  std::unordered_map<const c10::StorageImpl*, size_t> regions;
  for (const auto& [record, value] : watched) {
    seen.push_back(heldBy(value));
    ++regions[seen.back().first];
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < seen.size(); ++i) {
    const auto& [storage, holders] = seen[i];
    const bool isOurs = storage != nullptr && holders <= regions[storage];
    const auto& [record, value] = watched[i];
    const auto found = watched_.find(record);
    // A value that died since then has returned its record, which another value may use.
    const bool isAlive = found != watched_.end() && found->second == value;
    if (isAlive && isOurs && record->times.letGo == kNever) {
      record->times.letGo = now;
    }
  }
}

void StepTrace::add(OperatorRecord call) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (ValueRecord* input : call.inputs) {
    input->use.wasRead = true;
  }
  operators_.push_back(std::move(call));
}

void StepTrace::count(const char* what) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counted_[what];
}

std::vector<PythonStack> StepTrace::stacks() const {
  std::vector<PythonStack> found;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const ValueRecord& record : records_.all()) {
    found.push_back(record.stack);
  }
  return found;
}

namespace {

// For each stack its frames, innermost first, such as "/src/model.py:12 in forward".
using Frames = std::unordered_map<const c10::GatheredContext*, std::vector<std::string>>;

// Takes the GIL.
Frames framesOf(const std::vector<PythonStack>& stacks) {
  std::vector<torch::CapturedTraceback*> captured;
  for (const PythonStack& stack : stacks) {
    captured.push_back(torch::getCapturedTracebackFromContext(stack));
  }
  const torch::SymbolizedTracebacks named = torch::symbolize(captured);
  Frames found;
  for (size_t i = 0; i < stacks.size(); ++i) {
    std::vector<std::string>& frames = found[stacks[i].get()];
    for (const uint64_t place : named.tracebacks[i]) {
      const auto& [file, function, line] = named.all_frames[place];
      frames.push_back(c10::str(file, ":", line, " in ", function));
    }
  }
  return found;
}

// Groups the records of a trace into rows of a report.
class ReportRows {
 public:
  ReportRows(Report& report, const InputRecords& inputs, const Frames& frames)
      : report_(report), inputs_(inputs), frames_(frames) {}

  void add(const ValueRecord& record) {
    if (record.fate == Fate::Unneeded && record.replays.count == 0) {
      return;
    }
    const uint64_t index = rowOf(record);
    ReportRow& row = report_.rows[index];
    ++row.count;
    row.bytes += record.fate == Fate::Unneeded ? 0 : record.memory.nbytes;
    row.replays += record.replays.count;
    row.replaysAhead += record.replays.ahead;
    row.replaySeconds += inSeconds(record.replays.time);
    row.aheadSeconds += inSeconds(record.replays.timeAhead);
    values_.emplace(&record, report_.values.size());
    report_.values.push_back({index, record.memory.nbytes, record.use.packed});
  }

  // Adds the bytes that eager would hold to the rows. Called after the last record was added.
  void addEager() {
    for (const auto& [record, index] : values_) {
      ReportValue& value = report_.values[values_.at(&inputs_.first(*record))];
      value.packed |= record->use.packed;
      report_.rows[value.row].eager += inputs_.isInEager(*record) ? record->memory.nbytes : 0;
    }
  }

  void add(const OperatorRecord& replay, TraceTime duration) {
    report_.replays.push_back(
        {indicesOf(replay.inputs), indicesOf(replay.outputs), inSeconds(duration)});
  }

 private:
  using Key = std::tuple<
      MadeBy, const std::string*, const char*, c10::ScalarType, c10::DimVector, Fate,
      std::vector<std::string>>;

  uint64_t rowOf(const ValueRecord& record) {
    const bool isKept = inputs_.isKept(record);
    const Fate fate = isKept ? Fate::Kept : record.fate;
    const char* reason = record.reason;
    if (isKept && reason == nullptr) {
      reason = record.fate == Fate::Outside ? kOnlyHere : kHandedOn;
    }
    const auto named = frames_.find(record.stack.get());
    const auto& stack = named == frames_.end() ? kNoFrames : named->second;
    const Key key{record.origin, record.rule, reason, record.dtype, record.sizes, fate, stack};
    const auto [row, isNew] = rows_.emplace(key, report_.rows.size());
    if (isNew) {
      report_.rows.push_back(
          {.region = textOf(record.origin.region),
           .module = textOf(record.origin.module),
           .op = textOf(record.origin.op),
           .shape = {record.sizes.begin(), record.sizes.end()},
           .dtype = record.dtype,
           .fate = nameOf(fate),
           .rule = textOf(record.rule),
           .reason = reason == nullptr ? "" : reason,
           .stack = stack});
    }
    return row->second;
  }

  std::vector<uint64_t> indicesOf(const auto& records) const {
    std::vector<uint64_t> indices;
    for (const ValueRecord* record : records) {
      const auto value = values_.find(&inputs_.first(*record));
      if (value != values_.end()) {
        indices.push_back(value->second);
      }
    }
    return indices;
  }

  Report& report_;
  const InputRecords& inputs_;
  const Frames& frames_;
  std::map<Key, uint64_t> rows_;                             // indices in Report::rows
  std::unordered_map<const ValueRecord*, uint64_t> values_;  // indices in Report::values
};

// Adds a span for each name of a region: from the first unpacking in backward to the last. Regions
// of one name share a span.
void addBackwards(Report& report, const std::deque<ValueRecord>& records) {
  std::map<const std::string*, std::pair<TraceTime, TraceTime>> spans;
  for (const ValueRecord& record : records) {
    if (const TraceTime asked = record.times.asked; asked != kNever) {
      auto& [first, last] = spans.try_emplace(record.origin.region, asked, 0).first->second;
      first = std::min(first, asked);
      last = std::max(last, asked);
    }
  }
  for (const auto& [region, span] : spans) {
    const auto& [first, last] = span;
    report.spans.push_back({"backward", *region, inSeconds(first), inSeconds(last - first)});
  }
}

}  // namespace

Report StepTrace::report() {
  const auto frames = framesOf(stacks());
  const std::vector<TraceTime> durations = durationsOfOperators();
  Report report;
  report.number = step_;
  report.idleRules = names_.idleRules();
  std::lock_guard<std::mutex> lock(mutex_);
  report.ahead = {
      counted_["regions in time"], counted_["regions late"], counted_["regions in vain"],
      counted_["regions held"], counted_["regions stopped"]};
  const InputRecords inputs(records_.all());
  ReportRows rows(report, inputs, frames);
  const TraceTime now = this->now();
  for (const ValueRecord& record : records_.all()) {
    rows.add(record);
  }
  rows.addEager();
  for (size_t i = 0; i < durations.size(); ++i) {
    rows.add(operators_[i], durations[i]);
  }
  addTimeline(report, records_.all(), inputs, now);
  addBackwards(report, records_.all());
  report.spans.insert(report.spans.end(), spans_.begin(), spans_.end());
  return report;
}

namespace {

double inMilliseconds(TraceTime time) {
  return time == kNever ? -1 : static_cast<double>(time) * 1e-6;
}

ProfileValue profiled(const ValueRecord& record) {
  return {
      record.memory.nbytes,
      {record.sizes.begin(), record.sizes.end()},
      record.dtype,
      nameOf(record.fate),
      record.reason == nullptr ? "" : record.reason,
      record.use.packed,
      reinterpret_cast<uintptr_t>(record.memory.address),
      inMilliseconds(record.times.made),
      inMilliseconds(record.times.letGo),
      inMilliseconds(record.times.asked),
      record.use.node,
      inMilliseconds(record.times.back),
      reinterpret_cast<uintptr_t>(record.memory.backAt),
      inMilliseconds(record.times.ended),
      record.rows.total,
      record.rows.live,
      record.rows.mixed};
}

// `indices`: the index in Profile::values, for each record.
ProfileOperator profiled(
    const OperatorRecord& call, TraceTime duration,
    const std::unordered_map<const ValueRecord*, uint64_t>& indices) {
  const auto indicesOf = [&](const auto& records) {
    std::vector<uint64_t> found;
    for (const ValueRecord* record : records) {
      found.push_back(indices.at(record));
    }
    return found;
  };
  return {
      *call.origin.op,
      *call.origin.region,
      *call.origin.module,
      call.call,
      inMilliseconds(call.start),
      inMilliseconds(duration),
      indicesOf(call.inputs),
      indicesOf(call.outputs),
      call.random,
      call.inplace,
      call.replayable,
      call.readsRows};
}

}  // namespace

// Returns the duration of each call. Releases the lock before waiting for devices. The pointers
// stay valid, because calls never move and are never removed.
std::vector<TraceTime> StepTrace::durationsOfOperators() const {
  std::vector<const OperatorRecord*> calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const OperatorRecord& call : operators_) {
      calls.push_back(&call);
    }
  }
  std::vector<TraceTime> durations;
  for (const OperatorRecord* call : calls) {
    durations.push_back(call->timer ? call->timer->elapsed() : call->duration);
  }
  return durations;
}

// The profile includes unneeded values, because each unneeded value connects the operator that made
// the value with the operators that read the value.
Profile StepTrace::profile() const {
  Profile profile;
  profile.duration = inMilliseconds(now());
  const std::vector<TraceTime> durations = durationsOfOperators();
  std::lock_guard<std::mutex> lock(mutex_);
  std::unordered_map<const ValueRecord*, uint64_t> indices;
  for (const ValueRecord& record : records_.all()) {
    indices.emplace(&record, indices.size());
    profile.values.push_back(profiled(record));
  }
  for (size_t i = 0; i < durations.size(); ++i) {
    profile.operators.push_back(profiled(operators_[i], durations[i], indices));
  }
  for (const ReportSpan& span : spans_) {
    if (span.kind == "replay") {
      profile.replays.push_back({span.name, span.start * 1e3, span.seconds * 1e3});
    }
  }
  return profile;
}

}  // namespace ebb
