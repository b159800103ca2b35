// Replays that run before backward asks, on a thread of their own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ebb/export.h"
#include "ebb/fields.h"

namespace ebb {

// How far replays run ahead of backward.
struct AheadSettings {
  size_t regions = 0;              // outermost regions ahead of the one backward is in; 0: off
  size_t limit = size_t{1} << 30;  // most bytes that are there before backward needs them
  bool busyCores = false;          // also on a CPU that has no idle core for it
  bool sideStream = false;         // on a device: beside backward's stream, not on it

  static constexpr auto fields(auto function) {
    return function(
        Field{"regions", &AheadSettings::regions},
        Field{"limit", &AheadSettings::limit},
        Field{"busy_cores", &AheadSettings::busyCores},
        Field{"side_stream", &AheadSettings::sideStream});
  }
};

// For the whole process, from the next outermost region on.
EBB_API void configureAhead(const AheadSettings& settings);
EBB_API AheadSettings aheadSettings();

// What replays ahead did since the start of the process, and what is there now.
struct AheadStats {
  uint64_t regionsInTime = 0;   // made before backward reached them
  uint64_t regionsLate = 0;     // backward came while they were being made, and did the rest
  uint64_t regionsInVain = 0;   // backward never came
  uint64_t regionsHeld = 0;     // not given up, since no region followed before backward
  uint64_t regionsStopped = 0;  // of which something cannot be made ahead
  uint64_t failures = 0;        // replays that raised; backward runs them again
  uint64_t bytes = 0;           // there before backward needs them, now
  uint64_t mostBytes = 0;       // the most at a time
  uint64_t workers = 0;         // threads, now

  static constexpr auto fields(auto function) {
    return function(
        Field{"regions_in_time", &AheadStats::regionsInTime},
        Field{"regions_late", &AheadStats::regionsLate},
        Field{"regions_in_vain", &AheadStats::regionsInVain},
        Field{"regions_held", &AheadStats::regionsHeld},
        Field{"regions_stopped", &AheadStats::regionsStopped},
        Field{"failures", &AheadStats::failures},
        Field{"bytes", &AheadStats::bytes},
        Field{"most_bytes", &AheadStats::mostBytes},
        Field{"workers", &AheadStats::workers});
  }
};

EBB_API AheadStats aheadStats();

// Keeps what could be made again while less than `limit` bytes are in use, for the whole process:
// allocated on the device, or resident of the process on the CPU. 0, the default: off.
EBB_API void keepWhileThereIsRoom(size_t limit);

// What was given up since the process began because there was no room, or an allocation failed.
struct RoomStats {
  uint64_t regionsGivenUp = 0;
  uint64_t bytesGivenUp = 0;
  uint64_t failures = 0;  // allocations, in what could have been tried again
  uint64_t overcome = 0;  // operators, replays and copies that came to their end nevertheless

  static constexpr auto fields(auto function) {
    return function(
        Field{"regions_given_up", &RoomStats::regionsGivenUp},
        Field{"bytes_given_up", &RoomStats::bytesGivenUp},
        Field{"failures", &RoomStats::failures},
        Field{"overcome", &RoomStats::overcome});
  }
};

EBB_API RoomStats roomStats();

// Waits for the recipe that is running, and ends all threads. They start again when needed.
EBB_API void stopAhead();

// The same, and none starts again: the program is about to end.
EBB_API void endAhead();

}  // namespace ebb
