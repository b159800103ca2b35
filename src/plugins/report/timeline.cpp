#include "plugins/report/timeline.h"

#include <algorithm>
#include <functional>
#include <vector>

namespace ebb {
namespace {

constexpr size_t kMostPoints = 1000;

// A change of the held bytes.
struct Change {
  JournalTime time;
  int64_t held;
  int64_t eager;
};

struct Stretch {
  const void* address;
  JournalTime from;
  JournalTime to;
  size_t nbytes;
};

// Adds the stretches of memory that ebb holds because of `line`, which ended at `end`.
void addStretches(const Line& line, JournalTime end, std::vector<Stretch>& held) {
  switch (line.fate) {
    case Fate::Unneeded:
    case Fate::Result:
      break;
    case Fate::Outside:
      if (!InputLines::has(line)) {
        break;
      }
      [[fallthrough]];
    case Fate::Copied:
    case Fate::Saved:
    case Fate::Kept:
    case Fate::Escaped:
      held.push_back({line.memory.address, line.times.made, end, line.memory.nbytes});
      break;
    case Fate::Offloaded:
    case Fate::Paged:
      held.push_back({line.memory.address, line.times.made, line.times.sent, line.memory.nbytes});
      [[fallthrough]];
    case Fate::Recomputed:
      if (line.times.back != kNever) {
        held.push_back({line.memory.backAt, line.times.back, end, line.memory.nbytes});
      }
      break;
  }
}

// Adds the events of held memory. Memory that several lines describe at one time counts once.
void addHeld(std::vector<Stretch>& held, std::vector<Change>& events) {
  const auto before = std::less<const void*>();
  std::sort(held.begin(), held.end(), [&](const Stretch& a, const Stretch& b) {
    return a.address != b.address ? before(a.address, b.address) : a.from < b.from;
  });
  const Stretch* last = nullptr;
  JournalTime until = 0;
  for (const Stretch& next : held) {
    const bool goesOn = last != nullptr && next.address == last->address &&
                        next.address != nullptr && next.from < until;
    const JournalTime from = goesOn ? until : next.from;
    if (from < next.to) {
      events.push_back({from, static_cast<int64_t>(next.nbytes), 0});
      events.push_back({next.to, -static_cast<int64_t>(next.nbytes), 0});
    }
    until = goesOn ? std::max(until, next.to) : next.to;
    last = &next;
  }
}

std::vector<Change> eventsInOrder(
    const std::deque<Line>& lines, const InputLines& inputs, JournalTime now) {
  std::vector<Change> events;
  std::vector<Stretch> stretches;
  for (const Line& line : lines) {
    const JournalTime end = line.times.ended == kNever ? now : line.times.ended;
    addStretches(line, end, stretches);
    const bool isPart =
        line.fate != Fate::Unneeded && line.fate != Fate::Result && line.fate != Fate::Copied;
    if (isPart && inputs.isInEager(line)) {
      events.push_back({line.times.made, 0, static_cast<int64_t>(line.memory.nbytes)});
      events.push_back({end, 0, -static_cast<int64_t>(line.memory.nbytes)});
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
    Report& report, const std::deque<Line>& lines, const InputLines& inputs, JournalTime now) {
  const std::vector<Change> events = eventsInOrder(lines, inputs, now);
  const size_t stretch = std::max<size_t>(1, 2 * events.size() / kMostPoints);
  int64_t held = 0;
  int64_t eager = 0;
  ReportPoint highest{0, 0, 0};
  for (size_t i = 0; i < events.size(); ++i) {
    held += events[i].held;
    eager += events[i].eager;
    const ReportPoint point{
        static_cast<double>(events[i].time) * 1e-9,
        static_cast<uint64_t>(held),
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
