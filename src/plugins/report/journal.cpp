#include "plugins/report/journal.h"

#include <c10/util/ApproximateClock.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <string_view>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "plugins/report/input_lines.h"
#include "plugins/report/timeline.h"

namespace ebb {
namespace {

std::atomic<int64_t> liveJournals{0};

constexpr size_t kMostSpans = 1'000'000;  // in one step

const std::vector<std::string> kNoFrames;
const char* const kOnlyHere = "made outside of the region, and needed by its backward";
const char* const kHandedOn = "needed by another region's backward";

// The name of each Fate, in the order of the enum.
constexpr std::array kFates{
    "unneeded",
    "saved",
    "kept",
    "recomputed",
    "offloaded",
    "paged",
    "escaped",
    "result",
    "copied",
    "outside"};
static_assert(kFates.size() == static_cast<size_t>(Fate::Outside) + 1);

const char* nameOf(Fate fate) {
  return kFates[static_cast<size_t>(fate)];
}

double inSeconds(JournalTime time) {
  return static_cast<double>(time) * 1e-9;
}

std::string textOf(const std::string* text) {
  return text == nullptr ? "" : *text;
}

}  // namespace

Entry::~Entry() {
  decltype(Journal::watched_)::node_type watched;  // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(journal_->mutex_);
  watched = journal_->watched_.extract(&line_);
  line_.times.ended = journal_->now();
  if (line_.fate == Fate::Unneeded && line_.replays.count == 0 && !line_.use.wasRead &&
      !journal_->isProfile()) {
    journal_->lines_.remove(line_);
  }
}

void Entry::unpacks(uint32_t node) {
  journal_->asked(*this, node);
}

const std::string* JournalNames::intern(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  return &strings_.try_emplace(text).first->first;
}

const std::string* JournalNames::ruleThatDecided(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto rule = strings_.try_emplace(text).first;
  rule->second = true;
  return &rule->first;
}

bool JournalNames::isNewPolicy(std::shared_ptr<const void> policy) {
  std::lock_guard<std::mutex> lock(mutex_);
  return policies_.insert(std::move(policy)).second;
}

void JournalNames::addRule(const std::string& text) {
  const std::string* rule = intern(text);
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(rules_.begin(), rules_.end(), rule) == rules_.end()) {
    rules_.push_back(rule);
  }
}

std::vector<std::string> JournalNames::idleRules() const {
  std::vector<std::string> idle;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const std::string* rule : rules_) {
    if (!strings_.at(*rule)) {
      idle.push_back(*rule);
    }
  }
  return idle;
}

Line& Lines::add(Line line) {
  isEmpty_ = false;
  if (unused_.empty()) {
    return all_.emplace_back(std::move(line));
  }
  Line& place = *unused_.back();
  unused_.pop_back();
  return place = std::move(line);
}

Journal::Journal(uint64_t step, For what) : step_(step), what_(what), start_(c10::getTime()) {
  ++liveJournals;
}

Journal::~Journal() {
  --liveJournals;
}

int64_t Journal::live() {
  return liveJournals;
}

JournalTime Journal::now() const {
  return c10::getTime() - start_;
}

EntryPtr Journal::add(Line line) {
  line.times.made = now();
  std::lock_guard<std::mutex> lock(mutex_);
  return c10::make_intrusive<Entry>(shared_from_this(), lines_.add(std::move(line)));
}

void Journal::add(const char* kind, const std::string& name, JournalTime start, size_t nbytes) {
  const JournalTime duration = now() - start;
  const uint64_t thread = std::hash<std::thread::id>()(std::this_thread::get_id());
  const std::string* known = names_.intern(name);
  std::lock_guard<std::mutex> lock(mutex_);
  if (spans_.size() == kMostSpans) {
    return;  // a step without a backward may be endless
  }
  spans_.push_back({kind, known, start, duration, thread, nbytes});
}

uint64_t Journal::countRegion() {
  if (isProfile()) {
    look(now());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return regions_++;
}

void Journal::watch(const Entry& entry, Look look) {
  std::lock_guard<std::mutex> lock(mutex_);
  watched_.emplace(entry.line(), std::make_shared<Look>(std::move(look)));
}

void Journal::asked(const Entry& entry, uint32_t node) {
  const JournalTime time = now();
  if (isProfile() && !wasAsked_.exchange(true)) {
    look(time);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  Line& line = *entry.line();
  if (line.times.asked == kNever) {
    line.times.asked = time;
    line.use.node = node;
  }
}

void Journal::askedWith(const Entry& first, const Entry& entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  Line& line = *entry.line();
  if (line.times.asked == kNever) {
    line.times.asked = first.line()->times.asked;
    line.use.node = first.line()->use.node;
  }
}

// Finds watched values that only regions hold, and notes the time. Called without the lock, since
// this function may drop the last reference to a value or to its bytes.
void Journal::look(JournalTime now) {
  std::vector<std::pair<Line*, std::shared_ptr<Look>>> watched;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    watched.assign(watched_.begin(), watched_.end());
  }
  std::vector<RegionHold> seen;
  std::unordered_map<const c10::StorageImpl*, size_t> regions;
  for (const auto& [line, lookAt] : watched) {
    seen.push_back((*lookAt)());
    ++regions[seen.back().storage];
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < seen.size(); ++i) {
    const auto& [storage, holders] = seen[i];
    const bool isOurs = storage != nullptr && holders <= regions[storage];
    const auto& [line, lookAt] = watched[i];
    const auto found = watched_.find(line);
    // A value that died since then has returned its line, which another value may use.
    const bool isAlive = found != watched_.end() && found->second == lookAt;
    if (isAlive && isOurs && line->times.letGo == kNever) {
      line->times.letGo = now;
    }
  }
}

void Journal::add(OperatorLine call) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Line* input : call.inputs) {
    input->use.wasRead = true;
  }
  operators_.push_back(std::move(call));
}

void Journal::count(const char* what) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++counted_[what];
}

std::vector<PythonStack> Journal::stacks() const {
  std::vector<PythonStack> found;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Line& line : lines_.all()) {
    found.push_back(line.stack);
  }
  return found;
}

namespace {

// Groups the lines of a journal into rows of a report.
class ReportRows {
 public:
  ReportRows(Report& report, const InputLines& inputs, const Frames& frames)
      : report_(report), inputs_(inputs), frames_(frames) {
  }

  void add(const Line& line) {
    if (line.fate == Fate::Unneeded && line.replays.count == 0) {
      return;
    }
    const uint64_t index = rowOf(line);
    ReportRow& row = report_.rows[index];
    ++row.count;
    row.bytes += line.fate == Fate::Unneeded ? 0 : line.memory.nbytes;
    row.replays += line.replays.count;
    row.replaysAhead += line.replays.ahead;
    row.replaySeconds += inSeconds(line.replays.time);
    row.aheadSeconds += inSeconds(line.replays.timeAhead);
    values_.emplace(&line, report_.values.size());
    report_.values.push_back({index, line.memory.nbytes, line.use.packed});
  }

  // Adds the bytes that eager would hold to the rows. Called after the last line was added.
  void addEager() {
    for (const auto& [line, index] : values_) {
      ReportValue& value = report_.values[values_.at(&inputs_.first(*line))];
      value.packed |= line->use.packed;
      report_.rows[value.row].eager += inputs_.isInEager(*line) ? line->memory.nbytes : 0;
    }
  }

  void add(const OperatorLine& replay, JournalTime duration) {
    report_.replays.push_back(
        {indicesOf(replay.inputs), indicesOf(replay.outputs), inSeconds(duration)});
  }

 private:
  using Key = std::tuple<
      Origin,
      const std::string*,
      const char*,
      c10::ScalarType,
      c10::DimVector,
      Fate,
      std::vector<std::string>>;

  uint64_t rowOf(const Line& line) {
    const bool isKept = inputs_.isKept(line);
    const Fate fate = isKept ? Fate::Kept : line.fate;
    const char* reason = line.reason;
    if (isKept && reason == nullptr) {
      reason = line.fate == Fate::Outside ? kOnlyHere : kHandedOn;
    }
    const auto named = frames_.find(line.stack.get());
    const auto& stack = named == frames_.end() ? kNoFrames : named->second;
    const Key key{line.origin, line.rule, reason, line.dtype, line.sizes, fate, stack};
    const auto [row, isNew] = rows_.emplace(key, report_.rows.size());
    if (isNew) {
      report_.rows.push_back(
          {.region = textOf(line.origin.region),
           .module = textOf(line.origin.module),
           .op = textOf(line.origin.op),
           .shape = {line.sizes.begin(), line.sizes.end()},
           .dtype = line.dtype,
           .fate = nameOf(fate),
           .rule = textOf(line.rule),
           .reason = reason == nullptr ? "" : reason,
           .stack = stack});
    }
    return row->second;
  }

  std::vector<uint64_t> indicesOf(const auto& lines) const {
    std::vector<uint64_t> indices;
    for (const Line* line : lines) {
      const auto value = values_.find(&inputs_.first(*line));
      if (value != values_.end()) {
        indices.push_back(value->second);
      }
    }
    return indices;
  }

  Report& report_;
  const InputLines& inputs_;
  const Frames& frames_;
  std::map<Key, uint64_t> rows_;                      // indices in Report::rows
  std::unordered_map<const Line*, uint64_t> values_;  // indices in Report::values
};

// Adds the time from the first to the last unpacking in each region's backward.
void addBackwards(Report& report, const std::deque<Line>& lines) {
  std::map<const std::string*, std::pair<JournalTime, JournalTime>> spans;
  for (const Line& line : lines) {
    if (const JournalTime asked = line.times.asked; asked != kNever) {
      auto& [first, last] = spans.try_emplace(line.origin.region, asked, 0).first->second;
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

Report Journal::report() {
  const auto frames = framesOf(stacks());
  const std::vector<JournalTime> durations = durationsOfOperators();
  Report report;
  report.step = step_;
  report.idleRules = names_.idleRules();
  std::lock_guard<std::mutex> lock(mutex_);
  report.ahead = {
      counted_["regions in time"],
      counted_["regions late"],
      counted_["regions in vain"],
      counted_["regions held"],
      counted_["regions stopped"]};
  const InputLines inputs(lines_.all());
  ReportRows rows(report, inputs, frames);
  const JournalTime now = this->now();
  for (const Line& line : lines_.all()) {
    rows.add(line);
  }
  rows.addEager();
  for (size_t i = 0; i < durations.size(); ++i) {
    rows.add(operators_[i], durations[i]);
  }
  addTimeline(report, lines_.all(), inputs, now);
  addBackwards(report, lines_.all());
  for (const Span& span : spans_) {
    const double start = inSeconds(span.start);
    report.spans.push_back(
        {span.kind, *span.name, start, inSeconds(span.duration), span.thread, span.nbytes});
  }
  return report;
}

namespace {

double inMilliseconds(JournalTime time) {
  return time == kNever ? -1 : static_cast<double>(time) * 1e-6;
}

ProfileValue profiled(const Line& line) {
  return {
      line.memory.nbytes,
      {line.sizes.begin(), line.sizes.end()},
      line.dtype,
      nameOf(line.fate),
      line.reason == nullptr ? "" : line.reason,
      line.use.packed,
      reinterpret_cast<uintptr_t>(line.memory.address),
      inMilliseconds(line.times.made),
      inMilliseconds(line.times.letGo),
      inMilliseconds(line.times.asked),
      line.use.node,
      inMilliseconds(line.times.back),
      reinterpret_cast<uintptr_t>(line.memory.backAt),
      inMilliseconds(line.times.ended),
      line.rows.total,
      line.rows.live,
      line.rows.mixed};
}

// `indices`: the index in Profile::values, for each line.
ProfileOperator profiled(
    const OperatorLine& call,
    JournalTime duration,
    const std::unordered_map<const Line*, uint64_t>& indices) {
  const auto indicesOf = [&](const auto& lines) {
    std::vector<uint64_t> found;
    for (const Line* line : lines) {
      found.push_back(indices.at(line));
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
std::vector<JournalTime> Journal::durationsOfOperators() const {
  std::vector<const OperatorLine*> calls;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const OperatorLine& call : operators_) {
      calls.push_back(&call);
    }
  }
  std::vector<JournalTime> durations;
  for (const OperatorLine* call : calls) {
    durations.push_back(call->timer ? call->timer->elapsed() : call->duration);
  }
  return durations;
}

// The profile includes unneeded values, because each unneeded value connects the operator that made
// the value with the operators that read the value.
Profile Journal::profile() const {
  Profile profile;
  profile.duration = inMilliseconds(now());
  const std::vector<JournalTime> durations = durationsOfOperators();
  std::lock_guard<std::mutex> lock(mutex_);
  std::unordered_map<const Line*, uint64_t> indices;
  for (const Line& line : lines_.all()) {
    indices.emplace(&line, indices.size());
    profile.values.push_back(profiled(line));
  }
  for (size_t i = 0; i < durations.size(); ++i) {
    profile.operators.push_back(profiled(operators_[i], durations[i], indices));
  }
  for (const Span& span : spans_) {
    if (std::string_view(span.kind) == "replay") {
      profile.replays.push_back(
          {*span.name, inMilliseconds(span.start), inMilliseconds(span.duration)});
    }
  }
  return profile;
}

}  // namespace ebb
