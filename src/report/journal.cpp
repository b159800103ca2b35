#include "report/journal.h"

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

#include "report/only_ours.h"
#include "report/timeline.h"

namespace ebb {
namespace {

std::atomic<int64_t> liveJournals{0};

constexpr size_t kMostSpans = 1'000'000;  // in one step

const std::vector<std::string> kNoFrames;
const char* const kOnlyHere = "made outside of the region; only ebb holds it";
const char* const kHandedOn = "another region's backward needs it; only ebb holds it";

const char* nameOf(Fate fate) {
  switch (fate) {
    case Fate::Unneeded:
      return "unneeded";
    case Fate::Saved:
      return "saved";
    case Fate::Kept:
      return "kept";
    case Fate::Recomputed:
      return "recomputed";
    case Fate::Offloaded:
      return "offloaded";
    case Fate::Paged:
      return "paged";
    case Fate::Escaped:
      return "escaped";
    case Fate::Result:
      return "result";
    case Fate::Copied:
      return "copied";
    case Fate::Outside:
      return "outside";
  }
  return "?";
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
  line_.ended = journal_->now();
  if (line_.fate == Fate::Unneeded && line_.replays == 0 && !line_.wasRead &&
      !journal_->isProfile()) {
    journal_->unused_.push_back(&line_);
  }
}

void noteLast(const EntryPtr& entry) {
  if (entry) {
    entry->update([](Line& line) { line.wasLast = true; });
  }
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

const std::string* Journal::intern(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  return &*strings_.insert(text).first;
}

const std::string* Journal::ruleThatDecided(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  return *decidingRules_.insert(&*strings_.insert(text).first).first;
}

bool Journal::isNewPolicy(std::shared_ptr<const void> policy) {
  std::lock_guard<std::mutex> lock(mutex_);
  return policies_.insert(std::move(policy)).second;
}

void Journal::addRule(const std::string& text) {
  std::lock_guard<std::mutex> lock(mutex_);
  const std::string* rule = &*strings_.insert(text).first;
  if (std::find(rules_.begin(), rules_.end(), rule) == rules_.end()) {
    rules_.push_back(rule);
  }
}

EntryPtr Journal::add(Line line) {
  line.made = now();
  std::lock_guard<std::mutex> lock(mutex_);
  isEmpty_ = false;
  if (unused_.empty()) {
    lines_.emplace_back();
    unused_.push_back(&lines_.back());
  }
  Line& place = *unused_.back();
  unused_.pop_back();
  place = std::move(line);
  return c10::make_intrusive<Entry>(shared_from_this(), place);
}

void Journal::add(const char* kind, const std::string& name, JournalTime start, size_t nbytes) {
  const JournalTime duration = now() - start;
  const uint64_t thread = std::hash<std::thread::id>()(std::this_thread::get_id());
  std::lock_guard<std::mutex> lock(mutex_);
  if (spans_.size() == kMostSpans) {
    return;  // a step without a backward may be endless
  }
  spans_.push_back({kind, &*strings_.insert(name).first, start, duration, thread, nbytes});
}

DeviceTimer::DeviceTimer(c10::Stream stream)
    : stream(stream),
      first(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT),
      last(stream.device_type(), c10::EventFlag::BACKEND_DEFAULT) {
  first.record(stream);
}

JournalTime DeviceTimer::elapsed() {
  last.synchronize();
  return static_cast<JournalTime>(first.elapsedTime(last) * 1e6);
}

uint64_t Journal::countRegion() {
  if (isProfile()) {
    look(now());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return regions_++;
}

void Journal::watch(const Entry& entry, std::function<Held()> look) {
  std::lock_guard<std::mutex> lock(mutex_);
  watched_.emplace(entry.line(), std::move(look));
}

void Journal::asked(const Entry& entry) {
  const JournalTime time = now();
  if (!wasAsked_.exchange(true)) {
    look(time);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  JournalTime& asked = entry.line()->asked;
  asked = asked == kNever ? time : asked;
}

// Called without the lock, since the last reference to a value or to its bytes may be dropped here.
void Journal::look(JournalTime now) {
  std::vector<std::pair<Line*, std::function<Held()>>> watched;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    watched.assign(watched_.begin(), watched_.end());
  }
  std::vector<Held> seen;
  std::unordered_map<const c10::StorageImpl*, size_t> regions;
  for (const auto& [line, lookAt] : watched) {
    seen.push_back(lookAt());
    ++regions[seen.back().storage];
  }
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = 0; i < seen.size(); ++i) {
    const auto& [storage, holders] = seen[i];
    const bool isOurs = storage != nullptr && holders <= regions[storage];
    Line& line = *watched[i].first;
    if (isOurs && line.letGo == kNever) {
      line.letGo = now;
    }
  }
}

void Journal::add(OperatorLine call) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Line* input : call.inputs) {
    input->wasRead = true;
  }
  operators_.push_back(std::move(call));
}

void Journal::add(AheadFate ofRegion) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++ahead_[static_cast<size_t>(ofRegion)];
}

std::vector<PythonStack> Journal::stacks() const {
  std::vector<PythonStack> found;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const Line& line : lines_) {
    found.push_back(line.stack);
  }
  return found;
}

Report Journal::report() {
  look(now());
  const auto frames = framesOf(stacks());
  const std::vector<JournalTime> durations = durationsOfOperators();
  std::lock_guard<std::mutex> lock(mutex_);
  Report report;
  report.step = step_;
  const auto& [inTime, late, inVain, held, stopped] = ahead_;
  report.ahead = {inTime, late, inVain, held, stopped};
  using Key = std::tuple<
      const std::string*,
      const std::string*,
      const std::string*,
      const std::string*,
      const char*,
      c10::ScalarType,
      c10::DimVector,
      Fate,
      std::vector<std::string>>;
  std::map<Key, size_t> rows;
  std::unordered_map<const Line*, uint64_t> places;                             // in Report::values
  std::map<const std::string*, std::pair<JournalTime, JournalTime>> backwards;  // by region
  const OnlyOurs ours(lines_);
  Timeline timeline;
  const JournalTime now = this->now();
  for (const Line& line : lines_) {
    timeline.add(line, now, ours);
    if (line.asked != kNever) {
      auto& [first, last] = backwards.try_emplace(line.region, line.asked, 0).first->second;
      first = std::min(first, line.asked);
      last = std::max(last, line.asked);
    }
    if (line.fate == Fate::Unneeded && line.replays == 0) {
      continue;
    }
    const bool isKept = ours.isKept(line);
    const Fate fate = isKept ? Fate::Kept : line.fate;
    const char* reason = line.reason;
    if (isKept && reason == nullptr) {
      reason = line.fate == Fate::Outside ? kOnlyHere : kHandedOn;
    }
    const auto named = frames.find(line.stack.get());
    const auto& stack = named == frames.end() ? kNoFrames : named->second;
    const Key key{
        line.region, line.module, line.op, line.rule, reason, line.dtype, line.sizes, fate, stack};
    const auto [place, isNew] = rows.emplace(key, report.rows.size());
    if (isNew) {
      ReportRow row;
      row.region = textOf(line.region);
      row.module = textOf(line.module);
      row.op = textOf(line.op);
      row.rule = textOf(line.rule);
      row.reason = reason == nullptr ? "" : reason;
      row.dtype = line.dtype;
      row.shape = {line.sizes.begin(), line.sizes.end()};
      row.fate = nameOf(fate);
      row.stack = stack;
      report.rows.push_back(std::move(row));
    }
    ReportRow& row = report.rows[place->second];
    ++row.count;
    row.bytes += line.fate == Fate::Unneeded ? 0 : line.nbytes;
    row.replays += line.replays;
    row.replaysAhead += line.replaysAhead;
    row.replaySeconds += inSeconds(line.replayTime);
    row.aheadSeconds += inSeconds(line.aheadTime);
    places.emplace(&line, report.values.size());
    report.values.push_back({place->second, line.nbytes, line.packed});
  }
  for (const auto& [line, place] : places) {
    ReportValue& value = report.values[places.at(&ours.first(*line))];
    value.packed |= line->packed;
    report.rows[value.row].eager += ours.isInEager(*line) ? line->nbytes : 0;
  }
  const auto placesOf = [&](const auto& lines) {
    std::vector<uint64_t> found;
    for (const Line* line : lines) {
      const auto place = places.find(&ours.first(*line));
      if (place != places.end()) {
        found.push_back(place->second);
      }
    }
    return found;
  };
  for (size_t i = 0; i < durations.size(); ++i) {
    const OperatorLine& replay = operators_[i];
    report.replays.push_back(
        {placesOf(replay.inputs), placesOf(replay.outputs), inSeconds(durations[i])});
  }
  timeline.writeTo(report);
  for (const std::string* rule : rules_) {
    if (decidingRules_.count(rule) == 0) {
      report.idleRules.push_back(*rule);
    }
  }
  for (const auto& [region, asked] : backwards) {
    const auto& [first, last] = asked;
    report.spans.push_back({"backward", *region, inSeconds(first), inSeconds(last - first)});
  }
  for (const Span& span : spans_) {
    report.spans.push_back(
        {span.kind,
         *span.name,
         inSeconds(span.start),
         inSeconds(span.duration),
         span.thread,
         span.nbytes});
  }
  return report;
}

namespace {

double inMilliseconds(JournalTime time) {
  return time == kNever ? -1 : static_cast<double>(time) * 1e-6;
}

}  // namespace

// Waits for devices without the lock: calls are only added, and never move.
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

// Includes unneeded values: they are results of operators between others.
Profile Journal::profile() const {
  Profile profile;
  profile.duration = inMilliseconds(now());
  const std::vector<JournalTime> durations = durationsOfOperators();
  std::lock_guard<std::mutex> lock(mutex_);
  std::unordered_map<const Line*, uint64_t> places;
  for (const Line& line : lines_) {
    places.emplace(&line, places.size());
    profile.values.push_back(
        {line.nbytes,
         {line.sizes.begin(), line.sizes.end()},
         line.dtype,
         nameOf(line.fate),
         line.reason == nullptr ? "" : line.reason,
         line.packed,
         reinterpret_cast<uintptr_t>(line.address),
         inMilliseconds(line.made),
         inMilliseconds(line.letGo),
         inMilliseconds(line.asked),
         inMilliseconds(line.back),
         reinterpret_cast<uintptr_t>(line.backAt),
         inMilliseconds(line.ended),
         line.rows,
         line.liveRows,
         line.rowsMixed});
  }
  const auto inPlaces = [&](const auto& lines) {
    std::vector<uint64_t> found;
    for (const Line* line : lines) {
      found.push_back(places.at(line));
    }
    return found;
  };
  for (size_t i = 0; i < durations.size(); ++i) {
    const OperatorLine& call = operators_[i];
    profile.operators.push_back(
        {*call.op,
         *call.region,
         *call.module,
         call.call,
         inMilliseconds(call.start),
         inMilliseconds(durations[i]),
         inPlaces(call.inputs),
         inPlaces(call.outputs),
         call.random,
         call.inplace,
         call.replayable,
         call.readsRows});
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
