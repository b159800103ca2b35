// Replay ahead: replays on a separate thread, before backward needs the results.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ebb/export.h"
#include "ebb/fields.h"

namespace ebb {

// How far replays run ahead of backward.
struct AheadSettings {
  size_t regions = 0;              // how many outermost regions may be replayed ahead; 0: off
  size_t limit = size_t{1} << 30;  // most bytes recomputed before backward needs them

  EBB_FIELDS(AheadSettings, regions, limit)
};

// The settings apply to the whole process, from the next outermost region on.
EBB_API void configureAhead(const AheadSettings& settings);
EBB_API AheadSettings aheadSettings();

// Counts of replays ahead since the process started, and the current state.
struct AheadStats {
  uint64_t regionsInTime = 0;   // recomputed before backward reached them
  uint64_t regionsLate = 0;     // backward arrived during the replay and finished the region
  uint64_t regionsInVain = 0;   // recomputed, but backward never came
  uint64_t regionsHeld = 0;     // not freed before backward came, so backward needed no replay
  uint64_t regionsStopped = 0;  // recomputed in part; backward did the rest
  uint64_t failures = 0;        // replays that raised; backward runs them again
  uint64_t bytes = 0;           // currently recomputed and not yet needed
  uint64_t mostBytes = 0;       // peak of `bytes`
  uint64_t workers = 0;         // current number of threads

  EBB_FIELDS(AheadStats, regionsInTime, regionsLate, regionsInVain, regionsHeld, regionsStopped,
             failures, bytes, mostBytes, workers)
};

EBB_API AheadStats aheadStats();

// For the whole process: regions keep recomputable values in memory while memory is free. On entry
// to a region, ebb adds the bytes in use and the most bytes that any one region has kept so far. If
// the sum exceeds `limit`, the earliest regions free their kept values. "In use" means bytes
// allocated on the device; on the CPU, the process's resident memory. A `limit` of 0, the default,
// turns the option off.
EBB_API void keepWhileThereIsRoom(size_t limit);

// Regions and bytes freed because memory was short, since the process started.
struct RoomStats {
  uint64_t regionsGivenUp = 0;
  uint64_t bytesGivenUp = 0;
  uint64_t shortages = 0;  // how often memory was freed for an allocator that had run short

  EBB_FIELDS(RoomStats, regionsGivenUp, bytesGivenUp, shortages)
};

EBB_API RoomStats roomStats();

// Ends all threads that replay ahead, after their running recipes. The threads restart when needed.
EBB_API void stopAhead();

// Ends these threads for good, before the program exits.
EBB_API void endAhead();

}  // namespace ebb
