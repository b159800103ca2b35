// Values with the decision Offload: settings and statistics.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ebb/export.h"
#include "ebb/fields.h"

namespace ebb {

// Settings for values with the decision Offload. Sizes are in bytes.
struct OffloadSettings {
  size_t minBytes = size_t{1} << 20;         // smaller storages stay on the device
  size_t pinnedLimit = size_t{16} << 30;     // most pinned bytes; beyond, values are recomputed
  size_t inFlightBytes = size_t{1} << 30;    // bytes in flight above which the device waits
  size_t prefetchBytes = size_t{512} << 20;  // most bytes prefetched for backward
  size_t keepLast = 0;                       // number of the last values that stay on the device
  std::string disk;                          // directory of the disk tier; empty: no disk tier
  size_t diskLimit = size_t{64} << 30;       // most bytes on disk

  EBB_FIELDS(OffloadSettings, minBytes, pinnedLimit, inFlightBytes, prefetchBytes, keepLast, disk,
             diskLimit)
};

// The settings apply to the whole process, from the next value on. Throws c10::ValueError if ebb
// cannot create a file in `disk`.
EBB_API void configureOffload(const OffloadSettings& settings);
EBB_API OffloadSettings offloadSettings();

// Counts of the offload engine since the process started, and the current state.
struct OffloadStats {
  uint64_t bytesSent = 0;      // copied to the host
  uint64_t bytesFetched = 0;   // copied back
  uint64_t bytesRefused = 0;   // not sent, for lack of host memory
  uint64_t hostWaits = 0;      // times the host waited for a copy to or from disk
  uint64_t fetchedLate = 0;    // fetches that started only when the bytes were needed
  uint64_t mostInFlight = 0;   // peak of inFlightBytes
  uint64_t inFlightBytes = 0;  // sent, and their device memory not released yet
  uint64_t hostBytesHeld = 0;  // current pinned memory, in use or free
  uint64_t hostBytesUsed = 0;  // current pinned memory in use
  uint64_t stashes = 0;        // values currently away from the device
  uint64_t bytesSpilled = 0;   // moved from host memory to disk
  uint64_t diskBytesUsed = 0;  // current
  uint64_t mostTooSmall = 0;   // the largest storage below minBytes, which stayed on the device

  EBB_FIELDS(OffloadStats, bytesSent, bytesFetched, bytesRefused, hostWaits, fetchedLate,
             mostInFlight, inFlightBytes, hostBytesHeld, hostBytesUsed, stashes, bytesSpilled,
             diskBytesUsed, mostTooSmall)
};

EBB_API OffloadStats offloadStats();

}  // namespace ebb
