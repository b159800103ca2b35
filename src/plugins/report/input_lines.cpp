#include "plugins/report/input_lines.h"

namespace ebb {
namespace {

// True if the line is about a storage that was still in memory after its region.
bool isThere(const Line& line) {
  return line.fate == Fate::Saved || line.fate == Fate::Kept || line.fate == Fate::Escaped ||
         line.fate == Fate::Result;
}

}  // namespace

InputLines::InputLines(const std::deque<Line>& lines) {
  for (const Line& line : lines) {
    if (isThere(line) || has(line)) {
      lines_.emplace(line.memory.address, &line);
    }
  }
  for (const auto& [address, line] : lines_) {
    if (has(*line)) {
      const Line* other = before(*line);
      if (other == nullptr || other->fate == Fate::Result) {
        kept_.insert(other == nullptr ? line : other);
      }
    }
  }
}

bool InputLines::has(const Line& line) {
  return line.fate == Fate::Outside && line.use.isActivation;
}

bool InputLines::isInEager(const Line& line) const {
  return line.use.packed && (line.fate != Fate::Outside || has(line)) && !wasPackedBefore(line);
}

const Line& InputLines::first(const Line& line) const {
  const Line* other = has(line) ? before(line) : nullptr;
  return other == nullptr ? line : first(*other);
}

bool InputLines::wasPackedBefore(const Line& line) const {
  const Line* other = has(line) ? before(line) : nullptr;
  return other != nullptr && (other->use.packed || wasPackedBefore(*other));
}

// The latest earlier line about the same storage; null if there is none. The line of a region's
// result counts, although that line ended with the region.
const Line* InputLines::before(const Line& line) const {
  const Line* last = nullptr;
  const auto [begin, end] = lines_.equal_range(line.memory.address);
  for (auto place = begin; place != end; ++place) {
    const Line& other = *place->second;
    const bool lasts = other.fate == Fate::Result || other.times.ended == kNever ||
                       other.times.ended > line.times.made;
    if (other.memory.nbytes == line.memory.nbytes && other.times.made < line.times.made && lasts &&
        (last == nullptr || other.times.made > last->times.made)) {
      last = &other;
    }
  }
  return last;
}

}  // namespace ebb
