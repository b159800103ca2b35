// Which storages from outside nobody but ebb holds.
#pragma once

#include <deque>
#include <unordered_map>
#include <unordered_set>

#include "report/journal.h"

namespace ebb {

// See Note [What only ebb holds]. Several lines may describe one storage: the line of the region
// that made it, and one line of each region that reads it. These lines have the same address.
class OnlyOurs {
 public:
  explicit OnlyOurs(const std::deque<Line>& lines);

  // Whether `line` came from outside, and nobody else holds it.
  static bool has(const Line& line);

  // Whether such a storage counts in this line, as kept. It counts in one of its lines.
  bool isKept(const Line& line) const {
    return kept_.count(&line) > 0;
  }

  // Whether eager would hold its storage for backward, and no line of an earlier region says so.
  bool isInEager(const Line& line) const;

  // The line of the region that made its storage, or that was the first to read it.
  const Line& first(const Line& line) const;

 private:
  bool wasPackedBefore(const Line& line) const;
  const Line* before(const Line& line) const;

  std::unordered_multimap<const void*, const Line*> lines_;  // by the address of the bytes
  std::unordered_set<const Line*> kept_;
};

}  // namespace ebb
