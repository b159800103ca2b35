// Calls by which the ranks of a process group compare the collectives that replays repeat.
#pragma once

#include <cstdint>
#include <string>

#include "ebb/export.h"

namespace ebb {

// See Note [Repeated collectives]. `group` is the name of the process group. `place` says which of
// the group's lists a list is. `list` has the names of the collectives; it may be empty.
struct CollectivesOfRanks {
  // The number of a new region with such collectives, in the order of the forward.
  uint64_t (*number)(const std::string& group);
  // Makes a list known, so that ebb can answer other ranks. Returns true if the ranks have not
  // compared such a list before.
  bool (*tell)(
      const std::string& group, const std::string& region, const std::string& place,
      const std::string& list);
  // Compares a list with those of the other ranks, unless such a list was compared before.
  // `always`: compares in any case. Returns why the ranks cannot repeat the list; empty: they can.
  std::string (*compare)(
      const std::string& group, const std::string& region, const std::string& place,
      const std::string& list, bool always);
  // Why another rank cannot take part in a collective for which this rank waits; empty: unknown.
  std::string (*problem)(const std::string& group);
};

// The bindings provide the functions; null in a program without Python.
EBB_API void setCollectivesOfRanks(const CollectivesOfRanks& given);
const CollectivesOfRanks* collectivesOfRanks();

// Throws if another rank will not take part in a collective of the process group `group`.
void checkOtherRanks(const std::string& group);

}  // namespace ebb
