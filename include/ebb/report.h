// What regions did: counters, and reports of steps.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "ebb/fields.h"

namespace ebb {

// One region's counts, or a sum of them. Bytes count each storage once.
struct RegionCounters {
  uint64_t entered = 0;           // times the region was entered
  uint64_t opsSeen = 0;           // ops that reached ebb; views do not
  uint64_t opsRecorded = 0;       // those of them for which a recipe was written
  uint64_t opsReplayed = 0;       // recipes run again
  uint64_t opsReplayedAhead = 0;  // those of them that ran before backward asked
  uint64_t bytesSaved = 0;        // made in the region, kept for autograd or for recipes
  uint64_t bytesPacked = 0;       // those of them that autograd packed
  uint64_t bytesDropped = 0;      // made in the region, packed by autograd, not kept
  uint64_t bytesCopied = 0;       // copied before a write, because a recipe still needed them
  uint64_t bytesOffloaded = 0;    // sent to the host
  uint64_t bytesFellBack = 0;     // to be offloaded, but kept or recomputed for want of host memory
  uint64_t bytesPaged = 0;        // of storages whose live rows went to pages
  uint64_t bytesNotPaged = 0;     // to be paged, but kept: which rows live is not known
  uint64_t bytesEscaped = 0;      // could be recomputed, but held by others when the region ended
  uint64_t bytesFromOutside = 0;  // of inputs that only ebb held in the end

  EBB_API RegionCounters& operator+=(const RegionCounters& other);

  static constexpr auto fields(auto function) {
    return function(
        Field{"entered", &RegionCounters::entered},
        Field{"ops_seen", &RegionCounters::opsSeen},
        Field{"ops_recorded", &RegionCounters::opsRecorded},
        Field{"ops_replayed", &RegionCounters::opsReplayed},
        Field{"ops_replayed_ahead", &RegionCounters::opsReplayedAhead},
        Field{"bytes_saved", &RegionCounters::bytesSaved},
        Field{"bytes_packed", &RegionCounters::bytesPacked},
        Field{"bytes_dropped", &RegionCounters::bytesDropped},
        Field{"bytes_copied", &RegionCounters::bytesCopied},
        Field{"bytes_offloaded", &RegionCounters::bytesOffloaded},
        Field{"bytes_fell_back", &RegionCounters::bytesFellBack},
        Field{"bytes_paged", &RegionCounters::bytesPaged},
        Field{"bytes_not_paged", &RegionCounters::bytesNotPaged},
        Field{"bytes_escaped", &RegionCounters::bytesEscaped},
        Field{"bytes_from_outside", &RegionCounters::bytesFromOutside});
  }
};

// What the offloaded values of one op of one region did. In bytes.
struct TransferCounters {
  uint64_t sent = 0;            // copied to the host
  uint64_t fetched = 0;         // copied back
  uint64_t waitedByHost = 0;    // of copies that the host waited for
  uint64_t waitedByDevice = 0;  // fetched so late that the compute stream had to wait
  uint64_t refused = 0;         // not sent, for want of host memory
  uint64_t spilled = 0;         // moved on from the host to disk

  static constexpr auto fields(auto function) {
    return function(
        Field{"bytes_offloaded", &TransferCounters::sent},
        Field{"bytes_reloaded", &TransferCounters::fetched},
        Field{"bytes_waited_host", &TransferCounters::waitedByHost},
        Field{"bytes_waited_device", &TransferCounters::waitedByDevice},
        Field{"bytes_fell_back", &TransferCounters::refused},
        Field{"bytes_spilled", &TransferCounters::spilled});
  }
};

// What the last step did. A step begins when an outermost region is entered after a backward.
struct Stats {
  std::map<std::string, RegionCounters> regions;                             // by region name
  RegionCounters total;                                                      // their sum
  std::map<std::string, std::map<std::string, TransferCounters>> transfers;  // by region and op
  std::vector<std::string> demoted;  // ops that verify mode found must be saved
  uint64_t step = 0;                 // steps begun since the start or the last reset
  int64_t liveRecipes = 0;           // recipes that exist now, in the whole process
  int64_t liveHandles = 0;           // handles that exist now
  int64_t openRegions = 0;           // outermost regions that are open now

  static constexpr auto fields(auto function) {
    return function(
        Field{"step", &Stats::step},
        Field{"regions", &Stats::regions},
        Field{"total", &Stats::total},
        Field{"transfers", &Stats::transfers},
        Field{"demoted_ops", &Stats::demoted},
        Field{"live_recipes", &Stats::liveRecipes},
        Field{"live_handles", &Stats::liveHandles},
        Field{"open_regions", &Stats::openRegions});
  }
};

EBB_API Stats stats();

// Sets the counters to zero; what is alive stays counted.
EBB_API void resetStats();

// Storages of a step that are alike. Each storage counts once.
struct ReportRow {
  std::string region;          // in which they were made
  std::string module;          // in which they were made; empty if nobody tracks modules
  std::string op;              // that made them; "from outside" for what none made
  std::vector<int64_t> shape;  // of the op's result
  at::ScalarType dtype = at::ScalarType::Undefined;
  // "saved" (by the policy), "kept" (cannot be made again), "recomputed", "offloaded", "paged",
  // "escaped" (could be dropped, but the program held it when the region ended), "result" (held by
  // the program only), "copied" (before a write), "outside" (inputs, parameters) or "unneeded".
  // What came from outside, or was a result, and has nobody but ebb that holds it is "kept".
  std::string fate;
  std::string rule;                // that decided, in words
  std::string reason;              // why they are kept against the policy's word; else empty
  uint64_t count = 0;              // storages
  uint64_t bytes = 0;              // of them; 0 if they are unneeded
  uint64_t eager = 0;              // the part of it that eager would hold for backward
  uint64_t replays = 0;            // results made again
  uint64_t replaysAhead = 0;       // those of them made before backward asked
  double replaySeconds = 0;        // of the host, in kernels that made these results again
  double aheadSeconds = 0;         // the part of it before backward asked
  std::vector<std::string> stack;  // of Python when they were made, innermost first

  static constexpr auto fields(auto function) {
    return function(
        Field{"region", &ReportRow::region},
        Field{"module", &ReportRow::module},
        Field{"op", &ReportRow::op},
        Field{"shape", &ReportRow::shape},
        Field{"dtype", &ReportRow::dtype},
        Field{"fate", &ReportRow::fate},
        Field{"rule", &ReportRow::rule},
        Field{"reason", &ReportRow::reason},
        Field{"count", &ReportRow::count},
        Field{"bytes", &ReportRow::bytes},
        Field{"eager", &ReportRow::eager},
        Field{"replays", &ReportRow::replays},
        Field{"replays_ahead", &ReportRow::replaysAhead},
        Field{"replay_seconds", &ReportRow::replaySeconds},
        Field{"ahead_seconds", &ReportRow::aheadSeconds},
        Field{"stack", &ReportRow::stack});
  }
};

// One storage of a row.
struct ReportValue {
  uint64_t row = 0;  // its place in Report::rows
  uint64_t bytes = 0;
  bool packed = false;  // by autograd

  static constexpr auto fields(auto function) {
    return function(
        Field{"row", &ReportValue::row},
        Field{"bytes", &ReportValue::bytes},
        Field{"packed", &ReportValue::packed});
  }
};

// One replay: places in Report::values of what it read and made.
struct ReportReplay {
  std::vector<uint64_t> inputs;
  std::vector<uint64_t> outputs;
  double seconds = 0;  // that backward waited: of the device if it ran there, else of the host

  static constexpr auto fields(auto function) {
    return function(
        Field{"inputs", &ReportReplay::inputs},
        Field{"outputs", &ReportReplay::outputs},
        Field{"seconds", &ReportReplay::seconds});
  }
};

// What the step's regions held for backward, and what eager would have held.
struct ReportPoint {
  double seconds = 0;  // since the step began
  uint64_t held = 0;   // bytes
  uint64_t eager = 0;  // bytes

  static constexpr auto fields(auto function) {
    return function(
        Field{"seconds", &ReportPoint::seconds},
        Field{"held", &ReportPoint::held},
        Field{"eager", &ReportPoint::eager});
  }
};

// A piece of ebb's work.
struct ReportSpan {
  // "region", "backward" (from when it first asked for a value of the region, until it last did),
  // "replay", "replay ahead", "offload", "stash" or "reload".
  std::string kind;
  std::string name;    // of the region or the op
  double start = 0;    // seconds since the step began
  double seconds = 0;  // of the host
  uint64_t thread = 0;
  uint64_t bytes = 0;  // that were moved

  static constexpr auto fields(auto function) {
    return function(
        Field{"kind", &ReportSpan::kind},
        Field{"name", &ReportSpan::name},
        Field{"start", &ReportSpan::start},
        Field{"seconds", &ReportSpan::seconds},
        Field{"thread", &ReportSpan::thread},
        Field{"bytes", &ReportSpan::bytes});
  }
};

// What became of a step's outermost regions while replays run ahead, see AheadStats. In regions.
struct ReportAhead {
  uint64_t inTime = 0;
  uint64_t late = 0;
  uint64_t inVain = 0;
  uint64_t held = 0;
  uint64_t stopped = 0;

  static constexpr auto fields(auto function) {
    return function(
        Field{"in_time", &ReportAhead::inTime},
        Field{"late", &ReportAhead::late},
        Field{"in_vain", &ReportAhead::inVain},
        Field{"held", &ReportAhead::held},
        Field{"stopped", &ReportAhead::stopped});
  }
};

// What one step did.
struct Report {
  uint64_t step = 0;            // as in Stats
  std::vector<ReportRow> rows;  // in order of first appearance
  std::vector<ReportValue> values;
  std::vector<ReportReplay> replays;
  std::vector<ReportPoint> timeline;
  std::vector<ReportSpan> spans;
  ReportAhead ahead;
  std::vector<std::string> idleRules;  // that decided on nothing, in words
  uint64_t peakHeld = 0;               // of the timeline, in bytes
  uint64_t peakEager = 0;              // what eager would have held at most, in bytes

  static constexpr auto fields(auto function) {
    return function(
        Field{"step", &Report::step},
        Field{"rows", &Report::rows},
        Field{"values", &Report::values},
        Field{"replays", &Report::replays},
        Field{"timeline", &Report::timeline},
        Field{"spans", &Report::spans},
        Field{"ahead", &Report::ahead},
        Field{"idle_rules", &Report::idleRules},
        Field{"peak_held", &Report::peakHeld},
        Field{"peak_eager", &Report::peakEager});
  }
};

// Records reports of the last so many steps; 0 is off, as at the start. Gives the number before.
// Recording costs about a microsecond for each value.
EBB_API uint32_t setReporting(uint32_t steps);
EBB_API bool isReporting();

// The last steps that were recorded, oldest first; the last may be going on.
EBB_API std::vector<Report> reports();
EBB_API void clearReports();

}  // namespace ebb
