#include "plugins/report/timeline.h"

#include <algorithm>
#include <functional>
#include <vector>

namespace ebb {
namespace {

constexpr size_t kMostPoints = 1000;

// A change of the held bytes.
struct Change {
  TraceTime time;
  int64_t held;
  int64_t eager;
};

struct Stretch {
  const void* address;
  TraceTime from;
  TraceTime to;
  size_t nbytes;
};

// Adds the stretches of memory that ebb holds because of `record`, which ended at `end`.
void addStretches(const ValueRecord& record, TraceTime end, std::vector<Stretch>& held) {
  switch (record.fate) {
    case Fate::Unneeded:
    case Fate::Result:
      break;
    case Fate::Outside:
      if (!InputRecords::has(record)) {
        break;
      }
      [[fallthrough]];
    case Fate::Copied:
    case Fate::Saved:
    case Fate::Kept:
    case Fate::Escaped:
      held.push_back({record.memory.address, record.times.made, end, record.memory.nbytes});
      break;
    case Fate::Offloaded:
    case Fate::Paged:
      held.push_back(
          {record.memory.address, record.times.made, record.times.sent, record.memory.nbytes});
      [[fallthrough]];
    case Fate::Recomputed:
      if (record.times.back != kNever) {
        held.push_back({record.memory.backAt, record.times.back, end, record.memory.nbytes});
      }
      break;
  }
}

// Adds the events of held memory. Memory that several records describe at one time counts once.
void addHeld(std::vector<Stretch>& held, std::vector<Change>& events) {
  const auto before = std::less<const void*>();
  std::sort(held.begin(), held.end(), [&](const Stretch& a, const Stretch& b) {
    return a.address != b.address ? before(a.address, b.address) : a.from < b.from;
  });
  const Stretch* last = nullptr;
  TraceTime until = 0;
  for (const Stretch& next : held) {
    const bool goesOn = last != nullptr && next.address == last->address &&
                        next.address != nullptr && next.from < until;
    const TraceTime from = goesOn ? until : next.from;
    if (from < next.to) {
      events.push_back({from, static_cast<int64_t>(next.nbytes), 0});
      events.push_back({next.to, -static_cast<int64_t>(next.nbytes), 0});
    }
    until = goesOn ? std::max(until, next.to) : next.to;
    last = &next;
  }
}

std::vector<Change> eventsInOrder(
    const std::deque<ValueRecord>& records, const InputRecords& inputs, TraceTime now) {
  std::vector<Change> events;
  std::vector<Stretch> stretches;
  for (const ValueRecord& record : records) {
    const TraceTime end = record.times.ended == kNever ? now : record.times.ended;
    addStretches(record, end, stretches);
    const bool isPart =
        record.fate != Fate::Unneeded && record.fate != Fate::Result && record.fate != Fate::Copied;
    if (isPart && inputs.isInEager(record)) {
      events.push_back({record.times.made, 0, static_cast<int64_t>(record.memory.nbytes)});
      events.push_back({end, 0, -static_cast<int64_t>(record.memory.nbytes)});
    }
  }
  addHeld(stretches, events);
  std::stable_sort(events.begin(), events.end(), [](const Change& a, const Change& b) {
    return a.time < b.time;
  });
  return events;
}

}  // namespace

void addTimeline(
    Report& report, const std::deque<ValueRecord>& records, const InputRecords& inputs,
    TraceTime now) {
  const std::vector<Change> events = eventsInOrder(records, inputs, now);
  const size_t stretch = std::max<size_t>(1, 2 * events.size() / kMostPoints);
  int64_t held = 0;
  int64_t eager = 0;
  ReportPoint highest{0, 0, 0};
  for (size_t i = 0; i < events.size(); ++i) {
    held += events[i].held;
    eager += events[i].eager;
    const ReportPoint point{
        static_cast<double>(events[i].time) * 1e-9, static_cast<uint64_t>(held),
        static_cast<uint64_t>(eager)};
    report.peakHeld = std::max(report.peakHeld, point.held);
    report.peakEager = std::max(report.peakEager, point.eager);
    if (point.held >= highest.held) {
      highest = point;
    }
    if ((i + 1) % stretch == 0 || i + 1 == events.size()) {
      if (highest.seconds < point.seconds && highest.held > point.held) {
        report.timeline.push_back(highest);
      }
      report.timeline.push_back(point);
      highest = {};
    }
  }
}

}  // namespace ebb
