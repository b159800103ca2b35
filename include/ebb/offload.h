// Values with the decision Offload: settings, and what moved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "ebb/export.h"
#include "ebb/fields.h"

namespace ebb {

// How values with the decision Offload move. Sizes are in bytes.
struct OffloadSettings {
  size_t minBytes = size_t{1} << 20;       // smaller storages stay on the device
  size_t pinnedLimit = size_t{16} << 30;   // most host memory held; beyond it values are recomputed
  size_t inFlightBytes = size_t{1} << 30;  // most on their way out; the host waits. 0: no overlap
  size_t prefetchBytes = size_t{512} << 20;  // most fetched before backward asks for them
  size_t keepLast = 0;                       // the last values that were sent stay on the device
  std::string disk;                          // directory of the disk tier; empty for none
  size_t diskLimit = size_t{64} << 30;       // most bytes on disk
  bool isStatic = false;                     // for CUDA graphs: the host never asks nor waits

  static constexpr auto fields(auto function) {
    return function(
        Field{"min_bytes", &OffloadSettings::minBytes},
        Field{"pinned_limit", &OffloadSettings::pinnedLimit},
        Field{"in_flight_bytes", &OffloadSettings::inFlightBytes},
        Field{"prefetch_bytes", &OffloadSettings::prefetchBytes},
        Field{"keep_last", &OffloadSettings::keepLast},
        Field{"disk", &OffloadSettings::disk},
        Field{"disk_limit", &OffloadSettings::diskLimit},
        Field{"static", &OffloadSettings::isStatic});
  }
};

// For the whole process, from the next value on. Throws c10::ValueError if no file can be made in
// `disk`.
EBB_API void configureOffload(const OffloadSettings& settings);
EBB_API OffloadSettings offloadSettings();

// What the offload engine did since the start of the process, and what it holds now.
struct OffloadStats {
  uint64_t bytesSent = 0;      // copied to the host
  uint64_t bytesFetched = 0;   // copied back
  uint64_t bytesRefused = 0;   // not sent, for want of host memory
  uint64_t hostWaits = 0;      // times the host waited for a copy
  uint64_t fetchedLate = 0;    // fetches that started only when the bytes were needed
  uint64_t mostInFlight = 0;   // the most bytes on their way out at a time
  uint64_t inFlightBytes = 0;  // now
  uint64_t hostBytesHeld = 0;  // now: pinned, in use or not
  uint64_t hostBytesUsed = 0;  // now
  uint64_t stashes = 0;        // values that are away, now
  uint64_t bytesSpilled = 0;   // moved on from the host to disk
  uint64_t diskBytesUsed = 0;  // now

  static constexpr auto fields(auto function) {
    return function(
        Field{"bytes_sent", &OffloadStats::bytesSent},
        Field{"bytes_fetched", &OffloadStats::bytesFetched},
        Field{"bytes_refused", &OffloadStats::bytesRefused},
        Field{"host_waits", &OffloadStats::hostWaits},
        Field{"fetched_late", &OffloadStats::fetchedLate},
        Field{"most_in_flight", &OffloadStats::mostInFlight},
        Field{"in_flight_bytes", &OffloadStats::inFlightBytes},
        Field{"host_bytes_held", &OffloadStats::hostBytesHeld},
        Field{"host_bytes_used", &OffloadStats::hostBytesUsed},
        Field{"stashes", &OffloadStats::stashes},
        Field{"bytes_spilled", &OffloadStats::bytesSpilled},
        Field{"disk_bytes_used", &OffloadStats::diskBytesUsed});
  }
};

EBB_API OffloadStats offloadStats();

}  // namespace ebb
