// Counters of regions, and reports of forwards and backwards.
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
  uint64_t bytesPacked = 0;       // part of bytesSaved that autograd packed
  uint64_t bytesDropped = 0;      // made in the region, packed by autograd, not kept
  uint64_t bytesCopied = 0;       // copied before a write, because a recipe still needed them
  uint64_t bytesOffloaded = 0;    // sent to the host
  uint64_t bytesFellBack = 0;     // decision Offload; kept or recomputed for lack of host memory
  uint64_t bytesPaged = 0;        // storages whose valid rows went to pages
  uint64_t bytesNotPaged = 0;     // decision Page, but kept: the valid rows are unknown
  uint64_t bytesEscaped = 0;      // recomputable, but in use by the program at the region's end

  EBB_API RegionCounters& operator+=(const RegionCounters& other);

  EBB_FIELDS(RegionCounters, entered, opsSeen, opsRecorded, opsReplayed, opsReplayedAhead,
             bytesSaved, bytesPacked, bytesDropped, bytesCopied, bytesOffloaded, bytesFellBack,
             bytesPaged, bytesNotPaged, bytesEscaped)
};

// Transfers of the offloaded values of one op of one region, in bytes.
struct TransferCounters {
  uint64_t bytesOffloaded = 0;     // copied to the host
  uint64_t bytesReloaded = 0;      // copied back
  uint64_t bytesWaitedHost = 0;    // copies that the host waited for
  uint64_t bytesWaitedDevice = 0;  // fetched so late that the compute stream had to wait
  uint64_t bytesFellBack = 0;      // not sent, for lack of host memory
  uint64_t bytesSpilled = 0;       // moved from host memory to disk

  EBB_FIELDS(TransferCounters, bytesOffloaded, bytesReloaded, bytesWaitedHost, bytesWaitedDevice,
             bytesFellBack, bytesSpilled)
};

// Counters of the last pass: a forward in regions and its backward. A pass begins when an outermost
// region is entered after a backward.
struct Stats {
  std::map<std::string, RegionCounters> regions;                             // by region name
  RegionCounters total;                                                      // sum over regions
  std::map<std::string, std::map<std::string, TransferCounters>> transfers;  // by region and op
  std::vector<std::string> demotedOps;  // ops that verify mode saves from now on
  uint64_t passes = 0;                  // passes begun since the start or the last reset
  int64_t liveRecipes = 0;              // current recipes of the whole process
  int64_t liveHandles = 0;              // current handles
  int64_t openRegions = 0;              // current open outermost regions

  EBB_FIELDS(Stats, passes, regions, total, transfers, demotedOps, liveRecipes, liveHandles,
             openRegions)
};

EBB_API Stats stats();

// Sets the counters to zero, but not the numbers of live recipes, live handles and open regions.
EBB_API void resetStats();

// Counts since the process started, which resetStats() does not change.
struct Totals {
  RegionCounters counters;              // of all regions
  uint64_t passes = 0;                  // forwards in regions whose backward has begun
  uint64_t replayNanoseconds = 0;       // host time of replays that backward waited for
  uint64_t replayAheadNanoseconds = 0;  // host time of other replays

  EBB_FIELDS(Totals, counters, passes, replayNanoseconds, replayAheadNanoseconds)
};

EBB_API Totals totals();

// From now on, replays are timed. Before the first call, the times of totals() are 0.
EBB_API void timeReplays();

// A group of similar storages of a pass. Each storage counts once.
struct ReportRow {
  std::string region;          // region that made the storages
  std::string module;          // module that made the storages; empty if modules are not tracked
  std::string op;              // op that made the storages; "from outside" if no op did
  std::vector<int64_t> shape;  // of the op's result
  at::ScalarType dtype = at::ScalarType::Undefined;
  // "saved" (by the policy), "kept" (cannot be recomputed), "recomputed", "offloaded", "paged",
  // "escaped" (recomputable, but the program referred to the storage when the region ended),
  // "result" (only the program refers to the storage), "copied" (before a write), "outside"
  // (inputs, parameters) or "unneeded". An activation from outside is "kept" in the row of the
  // region that made it, else of the first region whose backward needs it.
  std::string fate;
  std::string rule;           // deciding rule, in words
  std::string reason;         // why the storages are kept against the policy's decision; else empty
  uint64_t count = 0;         // number of storages
  uint64_t bytes = 0;         // total size; 0 if the fate is unneeded
  uint64_t eager = 0;         // part of bytes that eager would hold for backward
  uint64_t replays = 0;       // number of recomputed results
  uint64_t replaysAhead = 0;  // results recomputed before backward needed them
  double replaySeconds = 0;   // host time in kernels that recomputed these results
  double aheadSeconds = 0;    // part of replaySeconds that ran before backward needed the results
  std::vector<std::string> stack;  // Python stack at the op's call, innermost frame first

  EBB_FIELDS(ReportRow, region, module, op, shape, dtype, fate, rule, reason, count, bytes, eager,
             replays, replaysAhead, replaySeconds, aheadSeconds, stack)
};

// One storage of a row.
struct ReportValue {
  uint64_t row = 0;  // its place in Report::rows
  uint64_t bytes = 0;
  bool packed = false;  // by autograd

  EBB_FIELDS(ReportValue, row, bytes, packed)
};

// One replay. Inputs and outputs are places in Report::values.
struct ReportReplay {
  std::vector<uint64_t> inputs;
  std::vector<uint64_t> outputs;
  double seconds = 0;  // time that backward waited: device time on a device, else host time

  EBB_FIELDS(ReportReplay, inputs, outputs, seconds)
};

// Bytes resident for backward in the pass's regions, and the bytes that eager would hold.
struct ReportPoint {
  double seconds = 0;  // since the pass began
  uint64_t held = 0;   // bytes
  uint64_t eager = 0;  // bytes

  EBB_FIELDS(ReportPoint, seconds, held, eager)
};

// One piece of ebb's work.
struct ReportSpan {
  // "region", "backward" (from backward's first unpack in the region to its last), "replay",
  // "replay ahead", "offload" (OFFLOAD, to the host), "stash" (PAGE, to a pool) or "reload"
  // (OFFLOAD or PAGE, back).
  std::string kind;
  std::string name;    // of the region or the op
  double start = 0;    // seconds since the pass began
  double seconds = 0;  // host time
  uint64_t thread = 0;
  uint64_t bytes = 0;  // moved

  EBB_FIELDS(ReportSpan, kind, name, start, seconds, thread, bytes)
};

// Counts the pass's outermost regions by the outcome of their replay ahead; see AheadStats.
struct ReportAhead {
  uint64_t inTime = 0;
  uint64_t late = 0;
  uint64_t inVain = 0;
  uint64_t held = 0;
  uint64_t stopped = 0;

  EBB_FIELDS(ReportAhead, inTime, late, inVain, held, stopped)
};

// Report of one pass.
struct Report {
  uint64_t number = 0;          // of the pass, from 1; see Stats::passes
  std::vector<ReportRow> rows;  // in order of first appearance
  std::vector<ReportValue> values;
  std::vector<ReportReplay> replays;
  std::vector<ReportPoint> timeline;
  std::vector<ReportSpan> spans;
  ReportAhead ahead;
  std::vector<std::string> idleRules;  // rules that decided on nothing, in words
  uint64_t peakHeld = 0;               // peak of held in the timeline, in bytes
  uint64_t peakEager = 0;              // peak of eager, in bytes

  EBB_FIELDS(Report, number, rows, values, replays, timeline, spans, ahead, idleRules, peakHeld,
             peakEager)
};

// Records reports of the last `passes` passes; 0, the initial setting, turns reports off. Returns
// the previous setting. Recording costs about a microsecond per value.
EBB_API uint32_t setReporting(uint32_t passes);
EBB_API bool isReporting();

// The recorded passes, oldest first; the last may still be running.
EBB_API std::vector<Report> reports();
EBB_API void clearReports();

}  // namespace ebb
