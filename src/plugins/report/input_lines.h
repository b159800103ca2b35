// Activations from outside of a region that the region's backward needs.
#pragma once

#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "plugins/report/journal.h"

namespace ebb {

// An example is the activation between two blocks. Several lines may describe one storage: the line
// of the region that made the storage, and one line of each region that reads it. All of these
// lines have the same address.
class InputLines {
 public:
  explicit InputLines(const std::deque<Line>& lines);

  // True if `line` is about such an activation.
  static bool has(const Line& line);

  // True if the storage counts as kept in this line. A storage counts in one line only.
  bool isKept(const Line& line) const {
    return kept_.count(&line) > 0;
  }

  // True if eager would hold the storage for backward, and no line of an earlier region counts it.
  bool isInEager(const Line& line) const;

  // The line of the region that made the storage, or that was the first to read it.
  const Line& first(const Line& line) const;

 private:
  // True if an earlier region has packed the same storage, so the storage was counted.
  bool wasPackedBefore(const Line& line) const;
  const Line* before(const Line& line) const;

  std::unordered_multimap<const void*, const Line*> lines_;  // by the address of the bytes
  std::unordered_set<const Line*> kept_;
};

}  // namespace ebb
