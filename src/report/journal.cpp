#include "report/journal.h"

#include <c10/util/ApproximateClock.h>
#include <c10/util/StringUtil.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <iterator>
#include <map>
#include <string_view>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace ebb {
namespace {

struct Shelf {
  std::mutex mutex;                 // guards what follows
  std::deque<JournalPtr> journals;  // the current step's is last
  uint64_t step = 0;
  JournalPtr profile;              // takes the place of the current step's; null if there is none
  std::atomic<uint32_t> steps{0};  // how many are kept; 0: reports are not recorded
  std::atomic<bool> on{false};     // somebody wants a journal

  void begin() {
    journals.push_back(std::make_shared<Journal>(step));
    while (journals.size() > steps.load() + size_t{1}) {  // the last may not be complete
      // Those of steps in which nothing was recorded, which a profile took, say, go first.
      const auto last = std::prev(journals.end());
      const auto empty = std::find_if(journals.begin(), last, std::mem_fn(&Journal::isEmpty));
      journals.erase(empty == last ? journals.begin() : empty);
    }
  }
};

Shelf& shelf() {
  static auto* instance = new Shelf;
  return *instance;
}

constexpr size_t kMostPoints = 1000;      // of a timeline
constexpr size_t kMostSpans = 1'000'000;  // of a step

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

// What holds memory for backward, with ebb and in eager, and when.
class Timeline {
 public:
  void add(const Line& line, JournalTime now) {
    const JournalTime end = line.ended == kNever ? now : line.ended;
    switch (line.fate) {
      case Fate::Unneeded:
      case Fate::Result:
      case Fate::Outside:
        return;
      case Fate::Copied:
        held(line.made, end, line.nbytes);
        return;
      case Fate::Saved:
      case Fate::Kept:
      case Fate::Escaped:
        held(line.made, end, line.nbytes);
        break;
      case Fate::Offloaded:
      case Fate::Paged:
        held(line.made, line.sent, line.nbytes);
        [[fallthrough]];
      case Fate::Recomputed:
        if (line.back != kNever) {
          held(line.back, end, line.nbytes);
        }
        break;
    }
    if (line.packed) {
      events_.push_back({line.made, 0, static_cast<int64_t>(line.nbytes)});
      events_.push_back({end, 0, -static_cast<int64_t>(line.nbytes)});
    }
  }

  // The curves, with their highest points, and at most about kMostPoints in all.
  void writeTo(Report& report) {
    std::stable_sort(events_.begin(), events_.end(), [](const Event& a, const Event& b) {
      return a.time < b.time;
    });
    const size_t stretch = std::max<size_t>(1, 2 * events_.size() / kMostPoints);
    int64_t held = 0;
    int64_t eager = 0;
    ReportPoint highest{0, 0, 0};
    for (size_t i = 0; i < events_.size(); ++i) {
      held += events_[i].held;
      eager += events_[i].eager;
      const ReportPoint point{
          static_cast<double>(events_[i].time) * 1e-9,
          static_cast<uint64_t>(held),
          static_cast<uint64_t>(eager)};
      report.peakHeld = std::max(report.peakHeld, point.held);
      report.peakEager = std::max(report.peakEager, point.eager);
      if (point.held >= highest.held) {
        highest = point;
      }
      if ((i + 1) % stretch == 0 || i + 1 == events_.size()) {
        if (highest.seconds < point.seconds && highest.held > point.held) {
          report.timeline.push_back(highest);
        }
        report.timeline.push_back(point);
        highest = {};
      }
    }
  }

 private:
  struct Event {
    JournalTime time;
    int64_t held;
    int64_t eager;
  };
  void held(JournalTime from, JournalTime to, size_t nbytes) {
    events_.push_back({from, static_cast<int64_t>(nbytes), 0});
    events_.push_back({to, -static_cast<int64_t>(nbytes), 0});
  }
  std::vector<Event> events_;
};

std::string textOf(const std::string* text) {
  return text == nullptr ? "" : *text;
}

}  // namespace

Entry::~Entry() {
  std::lock_guard<std::mutex> lock(journal_->mutex_);
  line_.ended = journal_->now();
  if (line_.fate == Fate::Unneeded && line_.replays == 0 && !journal_->isProfile()) {
    journal_->unused_.push_back(&line_);
  }
}

Journal::Journal(uint64_t step, For what) : step_(step), what_(what), start_(c10::getTime()) {
}

bool Journal::isEmpty() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return lines_.empty();
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
    return;  // a step without a backward may go on for ever
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
  const JournalTime time = now();
  std::lock_guard<std::mutex> lock(mutex_);
  look(time);
  return regions_++;
}

void Journal::watch(const Entry& entry, std::function<Held()> look) {
  std::lock_guard<std::mutex> lock(mutex_);
  watched_.push_back({std::move(look), entry.line()});
}

void Journal::asked(const Entry& entry) {
  const JournalTime time = now();
  std::lock_guard<std::mutex> lock(mutex_);
  if (!std::exchange(wasAsked_, true)) {
    look(time);
  }
  JournalTime& asked = entry.line()->asked;
  asked = asked == kNever ? time : asked;
}

// Under the lock.
void Journal::look(JournalTime now) {
  std::unordered_map<const c10::StorageImpl*, size_t> regions;
  for (const Watched& one : watched_) {
    ++regions[one.look().storage];
  }
  std::erase_if(watched_, [&](const Watched& one) {
    const Held held = one.look();
    const bool isOurs = held.storage != nullptr && held.holders <= regions[held.storage];
    one.line->letGo = isOurs ? now : kNever;
    return isOurs;
  });
}

void Journal::add(OperatorLine call) {
  std::lock_guard<std::mutex> lock(mutex_);
  operators_.push_back(std::move(call));
}

void Journal::add(AheadFate ofRegion) {
  std::lock_guard<std::mutex> lock(mutex_);
  ++ahead_[static_cast<size_t>(ofRegion)];
}

Report Journal::report() const {
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
      Fate>;
  std::map<Key, size_t> places;
  Timeline timeline;
  const JournalTime now = this->now();
  for (const Line& line : lines_) {
    timeline.add(line, now);
    if (line.fate == Fate::Unneeded && line.replays == 0) {
      continue;
    }
    const Key key{
        line.region,
        line.module,
        line.op,
        line.rule,
        line.reason,
        line.dtype,
        line.sizes,
        line.fate};
    const auto [place, isNew] = places.emplace(key, report.rows.size());
    if (isNew) {
      ReportRow row;
      row.region = textOf(line.region);
      row.module = textOf(line.module);
      row.op = textOf(line.op);
      row.rule = textOf(line.rule);
      row.reason = line.reason == nullptr ? "" : line.reason;
      row.dtype = line.dtype;
      row.shape = {line.sizes.begin(), line.sizes.end()};
      row.fate = nameOf(line.fate);
      report.rows.push_back(std::move(row));
    }
    ReportRow& row = report.rows[place->second];
    ++row.count;
    row.bytes += line.fate == Fate::Unneeded ? 0 : line.nbytes;
    row.replays += line.replays;
    row.replaysAhead += line.replaysAhead;
    row.replaySeconds += static_cast<double>(line.replayTime) * 1e-9;
    row.aheadSeconds += static_cast<double>(line.aheadTime) * 1e-9;
  }
  timeline.writeTo(report);
  for (const std::string* rule : rules_) {
    if (decidingRules_.count(rule) == 0) {
      report.idleRules.push_back(*rule);
    }
  }
  for (const Span& span : spans_) {
    report.spans.push_back(
        {span.kind,
         *span.name,
         static_cast<double>(span.start) * 1e-9,
         static_cast<double>(span.duration) * 1e-9,
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

// A value that nothing needed is of use too: operators between others made it.
Profile Journal::profile() const {
  std::lock_guard<std::mutex> lock(mutex_);
  Profile profile;
  profile.duration = inMilliseconds(now());
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
  for (const OperatorLine& call : operators_) {
    profile.operators.push_back(
        {*call.op,
         *call.region,
         *call.module,
         call.call,
         inMilliseconds(call.start),
         inMilliseconds(call.timer ? call.timer->elapsed() : call.duration),
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

JournalPtr currentJournal() {
  Shelf& all = shelf();
  if (!all.on.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(all.mutex);
  if (all.profile) {
    return all.profile;
  }
  if (all.journals.empty()) {
    all.begin();
  }
  return all.journals.back();
}

void putJournalInPlace(JournalPtr profile) {
  Shelf& all = shelf();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.profile = std::move(profile);
  all.on.store(all.profile || all.steps.load() > 0);
}

void journalStepBegins(uint64_t step) {
  Shelf& all = shelf();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.step = step;
  if (all.steps.load() > 0) {
    all.begin();
  }
}

uint32_t setReporting(uint32_t steps) {
  Shelf& all = shelf();
  std::lock_guard<std::mutex> lock(all.mutex);
  const uint32_t before = all.steps.exchange(steps);
  all.on.store(steps > 0 || all.profile);
  if (before == 0 && steps > 0) {
    all.begin();  // what was recorded earlier in this step is another report
  }
  return before;
}

bool isReporting() {
  return shelf().steps.load(std::memory_order_relaxed) > 0;
}

void clearReports() {
  Shelf& all = shelf();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.journals.clear();
}

std::vector<Report> reports() {
  std::deque<JournalPtr> journals;
  {
    std::lock_guard<std::mutex> lock(shelf().mutex);
    journals = shelf().journals;
  }
  std::vector<Report> all;
  for (const JournalPtr& journal : journals) {
    all.push_back(journal->report());
  }
  return all;
}

}  // namespace ebb
