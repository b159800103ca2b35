// ebb for libtorch programs: regions in which activations are kept, or made again in backward, op
// by op, with gradients bit-identical to plain eager.
//
//   #include <ebb/ebb.h>
//
//   torch::Tensor loss;
//   {
//     ebb::Region region(ebb::saveMatmuls());
//     loss = net->forward(x).sum();
//   }
//   loss.backward();
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "ebb/fields.h"

namespace ebb {

// What happens to an op's outputs between forward and backward.
enum class Decision : uint8_t {
  Save,       // keep the bytes, if anything will need them
  Recompute,  // drop the bytes and run the op again in backward
  Offload,    // move the bytes to pinned host memory
  Page,       // move the live rows to a page pool on the device; needs markRows
};

// One line of a policy: it matches a result if all that it says holds.
struct Rule {
  std::string op;  // "aten::mm" (all overloads), "aten::mm.default", "aten.mm", or a glob
  Decision decision = Decision::Recompute;
  uint32_t every = 1;  // only each n-th call that all but the last four lines hold for, per region
  bool force = false;  // also for ops that are never replayed; `op` must name them exactly
  uint32_t nth = 0;    // only that call, counted likewise; 0: any
  bool perModule = false;                 // calls are counted per module
  std::string module{};                   // a glob over the innermost module's name; empty: any
  std::string name{};                     // only values with this name, see nameValue; empty: any
  size_t minBytes = 0;                    // the result's storage has at least so many
  size_t maxBytes = SIZE_MAX;             // ... and at most so many
  std::optional<at::ScalarType> dtype{};  // of the result
};

class Policy;
using PolicyPtr = std::shared_ptr<const Policy>;

// An ordered list of rules, the first that matches an op decides, and a default. Throws
// c10::ValueError for a rule that names no registered operator, giving the nearest names. `inputs`
// is for what a region reads and another autograd function computed: Save, Offload or Page.
EBB_API PolicyPtr makePolicy(
    std::vector<Rule> rules,
    Decision fallback = Decision::Recompute,
    Decision inputs = Decision::Save);

// Does what `first` says, and what `second` says where that is Recompute.
EBB_API PolicyPtr either(const PolicyPtr& first, const PolicyPtr& second);

// Gives the value that `tensor` shows a name, for rules that ask for one. If an earlier rule did
// not decide on it when it was made, the first rule with that name does now. Nothing outside of
// regions, nor to what no region computed.
EBB_API void nameValue(const at::Tensor& tensor, const std::string& name);

// Ops of this thread belong to the module of this name, from construction to destruction, for rules
// that ask for one.
class EBB_API ModuleScope {
 public:
  explicit ModuleScope(const std::string& name);
  ~ModuleScope();
  ModuleScope(const ModuleScope&) = delete;
  ModuleScope& operator=(const ModuleScope&) = delete;

 private:
  uint32_t before_;  // the module around it
};

// Keeps nothing but leaves: the most memory saved, the most recomputed.
EBB_API PolicyPtr recomputeAll();

// Keeps everything that anything needs, as if ebb were not there.
EBB_API PolicyPtr saveAll();

// Keeps what is dear to recompute: matrix products, convolutions and attention.
EBB_API PolicyPtr saveMatmuls();

// torchtitan's selective activation checkpointing: attention and collectives kept, and every
// second matrix product.
// Source: https://github.com/pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py
EBB_API PolicyPtr torchtitan();

// Recomputes everything, and offloads what the region reads and another function computed.
EBB_API PolicyPtr offloadInputs();

// JAX's names. Products of matrices, with and without those of batches of matrices; the rest is
// recomputed. Source: https://docs.jax.dev, jax.checkpoint_policies
EBB_API PolicyPtr dotsSaveable();
EBB_API PolicyPtr dotsWithNoBatchDimsSaveable();
EBB_API PolicyPtr offloadDotWithNoBatchDims();

// A region from construction to destruction, on the constructing thread. The outermost region is
// the boundary of recomputation; inner ones change the policy and the name.
class EBB_API Region {
 public:
  explicit Region(PolicyPtr policy = recomputeAll(), std::string name = "region");
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

 private:
  uint64_t id_;  // of this entry
};

// Whether replays are compared, bit for bit, with what the forward computed. Slow; for finding
// programs that write to memory behind torch's back, and operators that give other results when
// they are run again.
enum class VerifyMode : uint8_t {
  Off,     // not compared
  Raise,   // a difference throws ReplayMismatch
  Demote,  // a difference warns; the right bytes are used, and the op is saved from then on
};

// Sets the mode of regions that are entered from now on, in the whole process, and gives the one
// before. The first is that of the environment variable EBB_VERIFY: 0, 1 or demote.
EBB_API VerifyMode setVerifyMode(VerifyMode mode);

// Thrown by backward in verify mode. In Python it is ebb.ReplayMismatch.
class EBB_API ReplayMismatch : public c10::Error {
 public:
  using Error::Error;
};

// Says that of `tensor` only the first rows live: `rows` is one integer on the tensor's device, or
// counts whose sum it is. What is in the other rows must not matter to anything that the program
// computes. Operators of the region that keep rows apart pass it on to their results; values with
// the decision Page are paged if it has reached them. Nothing outside of regions. Throws
// c10::ValueError if the tensor's rows do not follow each other in a storage of its own, or if
// `rows` cannot be, where that is known on the host; c10::TypeError if it is no integer.
EBB_API void markRows(const at::Tensor& tensor, const at::Tensor& rows);

// Marks a write that torch does not see, to any of `tensors`, from construction to destruction: a
// raw kernel, a C library. Needed for tensors that were computed in the region or that recipes
// read; not for a result of `empty` or `zeros` that is filled before torch reads it.
class EBB_API Opaque {
 public:
  explicit Opaque(std::vector<at::Tensor> tensors);
  ~Opaque();
  Opaque(const Opaque&) = delete;
  Opaque& operator=(const Opaque&) = delete;

 private:
  std::vector<at::Tensor> tensors_;  // as given
};

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

// What happens when a page pool has no room: the gradients of the step then are of no use.
enum class PageOverflowMode : uint8_t {
  Deferred,  // pagingStepOk() tells; until then nobody waits
  Blocking,  // throws PageOverflow in the step; the host waits for each stash
  Assert,    // asserts on the device
};

// What dead rows come back as.
enum class DeadRows : uint8_t {
  Repeat,  // copies of the first row that lives: as harmless as that is
  Zero,
  Nan,   // zeros in tensors that have no NaN
  None,  // whatever is in fresh memory
};

// How values with the decision Page move.
struct PagingSettings {
  int64_t pageRows = 64;          // rows of a page
  double headroom = 1.1;          // of a pool, over what the recorded step needed
  double hostHeadroom = 0;        // likewise, of its second tier in pinned memory
  size_t deviceLimit = SIZE_MAX;  // most bytes of all pools of a device
  PageOverflowMode overflow = PageOverflowMode::Deferred;
  DeadRows deadRows = DeadRows::Repeat;
  int32_t prefetch = -1;  // layers whose pages come back ahead: 0 or 1; -1: 1 on accelerators only

  static constexpr auto fields(auto function) {
    return function(
        Field{"page_rows", &PagingSettings::pageRows},
        Field{"headroom", &PagingSettings::headroom},
        Field{"host_headroom", &PagingSettings::hostHeadroom},
        Field{"device_limit", &PagingSettings::deviceLimit},
        Field{"overflow", &PagingSettings::overflow},
        Field{"dead_rows", &PagingSettings::deadRows},
        Field{"prefetch", &PagingSettings::prefetch});
  }
};

// For the whole process, from the next pool on. Throws c10::ValueError for what makes no sense.
EBB_API void configurePaging(const PagingSettings& settings);
EBB_API PagingSettings pagingSettings();

// Whether the gradients of the step are good; see PageOverflowMode. Waits for the pools. If they
// are not, the next step runs unpaged and larger pools are made after it.
EBB_API bool pagingStepOk();

// Thrown in blocking mode. In Python it is ebb.PageOverflowError.
class EBB_API PageOverflow : public c10::Error {
 public:
  using Error::Error;
};

// One page pool.
struct PagePoolStats {
  std::string device;
  at::ScalarType dtype = at::ScalarType::Byte;
  int64_t rowBytes = 0;
  int64_t pageRows = 0;
  int64_t devicePages = 0;
  int64_t hostPages = 0;
  bool isStack = false;  // rows are given back in the reverse order, so no table is needed
  uint64_t bytes = 0;    // on the device

  static constexpr auto fields(auto function) {
    return function(
        Field{"device", &PagePoolStats::device},
        Field{"dtype", &PagePoolStats::dtype},
        Field{"row_bytes", &PagePoolStats::rowBytes},
        Field{"page_rows", &PagePoolStats::pageRows},
        Field{"device_pages", &PagePoolStats::devicePages},
        Field{"host_pages", &PagePoolStats::hostPages},
        Field{"stack", &PagePoolStats::isStack},
        Field{"bytes", &PagePoolStats::bytes});
  }
};

// What the paging engine did since the start of the process, and what it has now.
struct PagingStats {
  uint64_t steps = 0;          // that stashed anything, or that the user bracketed
  uint64_t recordedSteps = 0;  // of those, without pools
  uint64_t overflows = 0;      // steps that found too little room
  uint64_t spilledSteps = 0;   // of those that were asked about, with rows in the second tier
  uint64_t stashed = 0;        // values
  uint64_t resident = 0;       // values that stayed, since their backward came next
  uint64_t stashes = 0;        // values that are away, now
  uint64_t paddedBytes = 0;    // of the recorded step: held at a time, with dead rows
  uint64_t liveBytes = 0;      // likewise, without
  uint64_t poolBytes = 0;      // now, on devices
  uint64_t hostPoolBytes = 0;  // now, in pinned memory
  std::vector<PagePoolStats> pools;
  std::vector<std::string> schedule;  // of the recorded step

  static constexpr auto fields(auto function) {
    return function(
        Field{"steps", &PagingStats::steps},
        Field{"recorded_steps", &PagingStats::recordedSteps},
        Field{"overflows", &PagingStats::overflows},
        Field{"spilled_steps", &PagingStats::spilledSteps},
        Field{"stashed", &PagingStats::stashed},
        Field{"resident", &PagingStats::resident},
        Field{"stashes", &PagingStats::stashes},
        Field{"padded_bytes", &PagingStats::paddedBytes},
        Field{"live_bytes", &PagingStats::liveBytes},
        Field{"pool_bytes", &PagingStats::poolBytes},
        Field{"host_pool_bytes", &PagingStats::hostPoolBytes},
        Field{"pools", &PagingStats::pools},
        Field{"schedule", &PagingStats::schedule});
  }
};

EBB_API PagingStats pagingStats();

// One region's counts, or a sum of them. Bytes count each storage once.
struct RegionCounters {
  uint64_t entered = 0;         // times the region was entered
  uint64_t opsSeen = 0;         // ops that reached ebb; views do not
  uint64_t opsRecorded = 0;     // ... for which a recipe was written
  uint64_t opsReplayed = 0;     // recipes run again
  uint64_t bytesSaved = 0;      // made in the region, packed by autograd, kept
  uint64_t bytesDropped = 0;    // made in the region, packed by autograd, not kept
  uint64_t bytesCopied = 0;     // copied before a write, because a recipe still needed them
  uint64_t bytesOffloaded = 0;  // sent to the host
  uint64_t bytesFellBack = 0;   // to be offloaded, but kept or recomputed for want of host memory
  uint64_t bytesPaged = 0;      // of storages whose live rows went to pages
  uint64_t bytesNotPaged = 0;   // to be paged, but kept: which rows live is not known
  uint64_t bytesEscaped = 0;    // could be recomputed, but held by others when the region ended

  EBB_API RegionCounters& operator+=(const RegionCounters& other);

  static constexpr auto fields(auto function) {
    return function(
        Field{"entered", &RegionCounters::entered},
        Field{"ops_seen", &RegionCounters::opsSeen},
        Field{"ops_recorded", &RegionCounters::opsRecorded},
        Field{"ops_replayed", &RegionCounters::opsReplayed},
        Field{"bytes_saved", &RegionCounters::bytesSaved},
        Field{"bytes_dropped", &RegionCounters::bytesDropped},
        Field{"bytes_copied", &RegionCounters::bytesCopied},
        Field{"bytes_offloaded", &RegionCounters::bytesOffloaded},
        Field{"bytes_fell_back", &RegionCounters::bytesFellBack},
        Field{"bytes_paged", &RegionCounters::bytesPaged},
        Field{"bytes_not_paged", &RegionCounters::bytesNotPaged},
        Field{"bytes_escaped", &RegionCounters::bytesEscaped});
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
  std::string module;          // likewise; empty if nobody tracks modules
  std::string op;              // that made them; "from outside" for what none made
  std::vector<int64_t> shape;  // of the op's result
  at::ScalarType dtype = at::ScalarType::Undefined;
  // "saved" (by the policy), "kept" (cannot be made again), "recomputed", "offloaded", "paged",
  // "escaped" (could be dropped, but the program held it when the region ended), "result" (held by
  // the program only), "copied" (before a write), "outside" (inputs, parameters) or "unneeded".
  std::string fate;
  std::string rule;          // that decided, in words
  std::string reason;        // why they are kept against the policy's word; else empty
  uint64_t count = 0;        // storages
  uint64_t bytes = 0;        // of them; 0 if they are unneeded
  uint64_t replays = 0;      // results made again
  double replaySeconds = 0;  // of the host, in kernels that made these results again

  static constexpr auto fields(auto function) {
    return function(
        Field{"region", &ReportRow::region},
        Field{"module", &ReportRow::module},
        Field{"op", &ReportRow::op},
        Field{"shape", &ReportRow::shape},
        Field{"dtype", &ReportRow::dtype},
        Field{"decision", &ReportRow::fate},
        Field{"rule", &ReportRow::rule},
        Field{"reason", &ReportRow::reason},
        Field{"count", &ReportRow::count},
        Field{"bytes", &ReportRow::bytes},
        Field{"replays", &ReportRow::replays},
        Field{"replay_seconds", &ReportRow::replaySeconds});
  }
};

// What the step's regions held for backward, and what eager would have held.
struct ReportPoint {
  double seconds = 0;  // since the step began
  uint64_t held = 0;   // bytes
  uint64_t eager = 0;  // likewise

  static constexpr auto fields(auto function) {
    return function(
        Field{"seconds", &ReportPoint::seconds},
        Field{"held", &ReportPoint::held},
        Field{"eager", &ReportPoint::eager});
  }
};

// A piece of ebb's work.
struct ReportSpan {
  std::string kind;    // "region", "replay", "offload", "stash" or "reload"
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

// What one step did.
struct Report {
  uint64_t step = 0;            // as in Stats
  std::vector<ReportRow> rows;  // in order of first appearance
  std::vector<ReportPoint> timeline;
  std::vector<ReportSpan> spans;
  std::vector<std::string> idleRules;  // that decided on nothing, in words
  uint64_t peakHeld = 0;               // of the timeline, in bytes
  uint64_t peakEager = 0;              // likewise

  static constexpr auto fields(auto function) {
    return function(
        Field{"step", &Report::step},
        Field{"rows", &Report::rows},
        Field{"timeline", &Report::timeline},
        Field{"spans", &Report::spans},
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
