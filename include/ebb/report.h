// Counters of regions, and reports of steps.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "ebb/fields.h"

namespace ebb {

// Counts of one region, or a sum of counts. Byte counts count each storage once.
struct RegionCounters {
  uint64_t entered = 0;           // times the region was entered
  uint64_t opsSeen = 0;           // ops that reached ebb; views do not
  uint64_t opsRecorded = 0;       // ops seen that got a recipe
  uint64_t opsReplayed = 0;       // recipes run again
  uint64_t opsReplayedAhead = 0;  // recipes replayed before backward needed them
  uint64_t bytesSaved = 0;        // made in the region, kept for autograd or for recipes
  uint64_t bytesPacked = 0;       // bytesSaved that autograd packed
  uint64_t bytesDropped = 0;      // made in the region, packed by autograd, not kept
  uint64_t bytesCopied = 0;       // copied before a write, because a recipe still needed them
  uint64_t bytesOffloaded = 0;    // sent to the host
  uint64_t bytesFellBack = 0;     // decision Offload; kept or recomputed for lack of host memory
  uint64_t bytesPaged = 0;        // storages whose valid rows went to pages
  uint64_t bytesNotPaged = 0;     // decision Page, but kept: the valid rows are unknown
  uint64_t bytesEscaped = 0;      // recomputable, but in use by the program at the region's end
  uint64_t bytesFromOutside = 0;  // inputs whose last reference was ebb's

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

// Transfers of the offloaded values of one op of one region, in bytes.
struct TransferCounters {
  uint64_t sent = 0;            // copied to the host
  uint64_t fetched = 0;         // copied back
  uint64_t waitedByHost = 0;    // copies that the host waited for
  uint64_t waitedByDevice = 0;  // fetched so late that the compute stream had to wait
  uint64_t refused = 0;         // not sent, for lack of host memory
  uint64_t spilled = 0;         // moved from host memory to disk

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

// Counters of the last step. A step begins when an outermost region is entered after a backward.
struct Stats {
  std::map<std::string, RegionCounters> regions;                             // by region name
  RegionCounters total;                                                      // sum over regions
  std::map<std::string, std::map<std::string, TransferCounters>> transfers;  // by region and op
  std::vector<std::string> demoted;  // ops that verify mode saves from now on
  uint64_t step = 0;                 // steps begun since the start or the last reset
  int64_t liveRecipes = 0;           // current recipes of the whole process
  int64_t liveHandles = 0;           // current handles
  int64_t openRegions = 0;           // current open outermost regions

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

// Sets the counters to zero, but not the numbers of live recipes, live handles and open regions.
EBB_API void resetStats();

// A group of similar storages of a step. Each storage counts once.
struct ReportRow {
  std::string region;          // region that made the storages
  std::string module;          // module that made the storages; empty if modules are not tracked
  std::string op;              // op that made the storages; "from outside" if no op did
  std::vector<int64_t> shape;  // of the op's result
  at::ScalarType dtype = at::ScalarType::Undefined;
  // "saved" (by the policy), "kept" (cannot be recomputed), "recomputed", "offloaded", "paged",
  // "escaped" (recomputable, but the program referred to the storage when the region ended),
  // "result" (only the program refers to the storage), "copied" (before a write), "outside"
  // (inputs, parameters) or "unneeded". A result or a storage from outside becomes "kept" once only
  // ebb refers to the storage.
  std::string fate;
  std::string rule;           // deciding rule, in words
  std::string reason;         // why the storages are kept against the policy's decision; else empty
  uint64_t count = 0;         // number of storages
  uint64_t bytes = 0;         // total size; 0 if the fate is unneeded
  uint64_t eager = 0;         // part of bytes that eager would hold for backward
  uint64_t replays = 0;       // recomputed results
  uint64_t replaysAhead = 0;  // results recomputed before backward needed them
  double replaySeconds = 0;   // host time in kernels that recomputed these results
  double aheadSeconds = 0;    // part of replaySeconds that ran before backward needed the results
  std::vector<std::string> stack;  // Python stack at the op's call, innermost frame first

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
  double seconds = 0;  // time that backward waited: device time on a device, else host time

  static constexpr auto fields(auto function) {
    return function(
        Field{"inputs", &ReportReplay::inputs},
        Field{"outputs", &ReportReplay::outputs},
        Field{"seconds", &ReportReplay::seconds});
  }
};

// Bytes resident for backward in the step's regions, and the bytes that eager would hold.
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

// One piece of ebb's work.
struct ReportSpan {
  // "region", "backward" (from backward's first unpack in the region to its last), "replay",
  // "replay ahead", "offload" (OFFLOAD, to the host), "stash" (PAGE, to a pool) or "reload"
  // (OFFLOAD or PAGE, back).
  std::string kind;
  std::string name;    // of the region or the op
  double start = 0;    // seconds since the step began
  double seconds = 0;  // host time
  uint64_t thread = 0;
  uint64_t bytes = 0;  // moved

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

// Numbers of the step's outermost regions, by the outcome of their replay ahead; see AheadStats.
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

// Report of one step.
struct Report {
  uint64_t step = 0;            // as in Stats
  std::vector<ReportRow> rows;  // in order of first appearance
  std::vector<ReportValue> values;
  std::vector<ReportReplay> replays;
  std::vector<ReportPoint> timeline;
  std::vector<ReportSpan> spans;
  ReportAhead ahead;
  std::vector<std::string> idleRules;  // rules that decided on nothing, in words
  uint64_t peakHeld = 0;               // of the timeline, in bytes
  uint64_t peakEager = 0;              // peak of eager, in bytes

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

// Records reports of the last `steps` steps; 0, the initial setting, turns reports off. Returns the
// previous setting. Recording costs about a microsecond per value.
EBB_API uint32_t setReporting(uint32_t steps);
EBB_API bool isReporting();

// The recorded steps, oldest first; the last step may still be running.
EBB_API std::vector<Report> reports();
EBB_API void clearReports();

}  // namespace ebb
