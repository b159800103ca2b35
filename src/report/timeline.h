// The memory held for backward over time, with ebb and in eager.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ebb/report.h"
#include "report/only_ours.h"

namespace ebb {

class Timeline {
 public:
  void add(const Line& line, JournalTime now, const OnlyOurs& ours);

  // Writes both curves and their peaks. Long curves lose points, but not the peak of held memory.
  void writeTo(Report& report);

 private:
  struct Event {
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

  void addHeld();

  std::vector<Event> events_;
  std::vector<Stretch> held_;
};

}  // namespace ebb
