#include "report/timeline.h"

#include <algorithm>
#include <functional>

namespace ebb {
namespace {

constexpr size_t kMostPoints = 1000;

}  // namespace

void Timeline::add(const Line& line, JournalTime now, const OnlyOurs& ours) {
  const JournalTime end = line.times.ended == kNever ? now : line.times.ended;
  switch (line.fate) {
    case Fate::Unneeded:
    case Fate::Result:
      return;
    case Fate::Copied:
      held_.push_back({line.memory.address, line.times.made, end, line.memory.nbytes});
      return;
    case Fate::Outside:
      if (!OnlyOurs::has(line)) {
        return;
      }
      [[fallthrough]];
    case Fate::Saved:
    case Fate::Kept:
    case Fate::Escaped:
      held_.push_back({line.memory.address, line.times.made, end, line.memory.nbytes});
      break;
    case Fate::Offloaded:
    case Fate::Paged:
      held_.push_back({line.memory.address, line.times.made, line.times.sent, line.memory.nbytes});
      [[fallthrough]];
    case Fate::Recomputed:
      if (line.times.back != kNever) {
        held_.push_back({line.memory.backAt, line.times.back, end, line.memory.nbytes});
      }
      break;
  }
  if (ours.isInEager(line)) {
    events_.push_back({line.times.made, 0, static_cast<int64_t>(line.memory.nbytes)});
    events_.push_back({end, 0, -static_cast<int64_t>(line.memory.nbytes)});
  }
}

void Timeline::writeTo(Report& report) {
  addHeld();
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

// Adds the events of held memory. Memory that several lines describe at one time counts once.
void Timeline::addHeld() {
  const auto before = std::less<const void*>();
  std::sort(held_.begin(), held_.end(), [&](const Stretch& a, const Stretch& b) {
    return a.address != b.address ? before(a.address, b.address) : a.from < b.from;
  });
  const Stretch* last = nullptr;
  JournalTime until = 0;
  for (const Stretch& next : held_) {
    const bool goesOn = last != nullptr && next.address == last->address &&
                        next.address != nullptr && next.from < until;
    const JournalTime from = goesOn ? until : next.from;
    if (from < next.to) {
      events_.push_back({from, static_cast<int64_t>(next.nbytes), 0});
      events_.push_back({next.to, -static_cast<int64_t>(next.nbytes), 0});
    }
    until = goesOn ? std::max(until, next.to) : next.to;
    last = &next;
  }
}

}  // namespace ebb
