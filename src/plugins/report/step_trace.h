// The fate of each value of a step, for ebb::reports().
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/util/DimVector.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ebb/profile.h"
#include "ebb/report.h"
#include "hooks/slots.h"
#include "plugins/report/device_timer.h"

namespace ebb {

// Note [The trace of a step]
// While reports are recorded, each value of a region has a record in the step's trace. The record
// begins when ebb creates the value, and ends when the value and its handles are gone. Records are
// written under the trace's lock, and never move. No decision of ebb depends on a record. A value
// refers to its record by a `RecordRef`. While reports are not recorded, a graph has no trace, and
// its values have no reference.
enum class Fate : uint8_t {
  Unneeded,    // not packed by autograd; at most a replay needs the value
  Saved,       // kept by the policy's decision
  Kept,        // kept because it cannot be recomputed; see ValueRecord::reason
  Recomputed,  // packed by autograd, and freed
  Offloaded,   // sent to the host
  Paged,       // valid rows were copied to pages
  Escaped,     // recomputable, but the program held it when the region ended
  Result,      // not needed by autograd, but the program held it when the region ended
  Copied,      // a copy made before a write
  Outside,     // a parameter or input, made and held by other code
};

// torch's CapturedTraceback of an operator's call. StepTrace::report() looks up the names of its
// frames.
using PythonStack = std::shared_ptr<c10::GatheredContext>;

using TraceTime = int64_t;  // nanoseconds since the step began
constexpr TraceTime kNever = -1;

// An operator and where it was called. The strings belong to the trace.
// `region` and `op` are set in each record.
struct MadeBy {
  const std::string* region = nullptr;
  const std::string* module = nullptr;
  const std::string* op = nullptr;

  auto operator<=>(const MadeBy&) const = default;
};

// The memory of a value.
struct LineMemory {
  size_t nbytes = 0;  // of the storage
  const void* address = nullptr;
  const void* backAt = nullptr;  // address of the bytes after they were recomputed or fetched
};

// The users of a value.
struct LineUse {
  bool packed = false;              // by autograd
  bool wasRead = false;             // input of a replay in a report
  bool isActivation = false;        // see isActivation() in record/keeper.h
  bool isWeightCast = false;        // may be autocast's cast of a weight
  uint32_t handlesWithStorage = 0;  // from outside: number of autograd's handles with the storage
  uint32_t node = 0;                // number of the backward node that unpacked it first
};

// The replays of a value.
struct LineReplays {
  uint32_t count = 0;
  uint32_t ahead = 0;       // before backward needed the value
  TraceTime time = 0;       // host time in replayed kernels
  TraceTime timeAhead = 0;  // the part of `time` before backward needed the value
};

struct LineTimes {
  TraceTime made = 0;
  TraceTime letGo = kNever;  // values from outside: ebb first saw that only regions hold it
  TraceTime asked = kNever;  // backward unpacked the value
  TraceTime sent = kNever;   // to the host
  TraceTime back = kNever;   // recomputed or fetched
  TraceTime ended = kNever;  // the value and its handles are gone
};

// For profiles: as in ProfileValue.
struct RecordRows {
  int64_t total = 0;
  int64_t live = 0;
  bool mixed = false;
};

// All facts about one value.
struct ValueRecord {
  MadeBy origin;                      // the op that made the value
  const std::string* rule = nullptr;  // null: no policy was asked
  const char* reason = nullptr;       // why the value is in memory against the policy; else null
  Fate fate = Fate::Unneeded;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::DimVector sizes;  // of the tensor that the op made
  LineMemory memory;
  LineUse use;
  LineReplays replays;
  LineTimes times;
  RecordRows rows;
  PythonStack stack;  // where the value was made; null in profiles
};

// In a profile: one call of an operator, with a member for each field of the profile. In a report:
// one replay, with its inputs, its results, and the time that backward waited for it.
struct OperatorRecord {
  MadeBy origin;
  uint64_t call = 0;  // the number of outermost regions in the trace before
  TraceTime start = 0;
  TraceTime duration = 0;              // host time
  std::unique_ptr<DeviceTimer> timer;  // device time, if the op ran on a device
  c10::SmallVector<ValueRecord*, 4> inputs;
  c10::SmallVector<ValueRecord*, 2> outputs;
  bool random = false;
  bool inplace = false;
  bool replayable = false;
  bool readsRows = false;
};

class Policy;
class RecordRef;
class StepTrace;
using RecordRefPtr = c10::intrusive_ptr<RecordRef>;
using StepTracePtr = std::shared_ptr<StepTrace>;

// Refers to the record of a value. The value and its handles share the reference. The record ends
// with the reference.
class RecordRef final : public Extra {
 public:
  static const SlotNumber kSlot;

  RecordRef(StepTracePtr trace, ValueRecord& record) : trace_(std::move(trace)), record_(record) {}
  ~RecordRef() override;

  // Calls `change` on the record, under the trace's lock.
  template <class Change>
  void update(const Change& change) const;

  // The value's fate is noted when its region ends.
  bool waitsForEnd() const override { return true; }
  void unpacks(uint32_t node) override;

  ValueRecord* record() const { return &record_; }
  // The handles now show another value, whose record is `later`. Unpacks are noted there.
  void handOn(c10::intrusive_ptr<RecordRef> later);

 private:
  StepTracePtr trace_;
  ValueRecord& record_;                  // belongs to the trace
  c10::intrusive_ptr<RecordRef> later_;  // nearly always null
};

// The strings and rules of a trace. Strings live as long as the trace, so records compare and
// copy them as pointers.
class TraceNames {
 public:
  // `hasDecided`: the text is a rule that has decided on a value.
  const std::string* intern(const std::string& text, bool hasDecided = false);

  void addPolicy(const std::shared_ptr<const Policy>& policy);

  // The rules of the policies that decided on nothing.
  std::vector<std::string> idleRules() const;

 private:
  mutable std::mutex mutex_;                             // guards all members below
  std::unordered_map<std::string, bool> strings_;        // true for rules that decided on a value
  std::vector<std::shared_ptr<const Policy>> policies_;  // in the order of their first use
};

// The records of a trace. Lines never move.
class Lines {
 public:
  ValueRecord& add(ValueRecord record);

  // Lets a later add() reuse `record`. No reference to the record may be left.
  void remove(ValueRecord& record) { unused_.push_back(&record); }

  const std::deque<ValueRecord>& all() const { return all_; }

 private:
  std::deque<ValueRecord> all_;
  std::vector<ValueRecord*> unused_;
};

// The records, calls and spans of one step; one lock guards all of them.
class StepTrace final : public std::enable_shared_from_this<StepTrace> {
 public:
  enum class For : uint8_t { Report, Profile };
  explicit StepTrace(uint64_t step, For what = For::Report);
  ~StepTrace();

  // The number of traces that exist.
  EBB_API static int64_t live();

  // True for a profile: the trace records each call of an operator, and keeps all records.
  bool isProfile() const { return what_ == For::Profile; }

  // True until the first region. Takes no lock.
  bool isEmpty() const { return regions_ == 0; }

  TraceTime now() const;

  TraceNames& names() { return names_; }

  RecordRefPtr add(ValueRecord record);
  void add(const char* kind, const std::string& name, TraceTime start, size_t nbytes = 0);

  // Counts an event under its name, such as "regions in time".
  void count(const char* what);
  void add(OperatorRecord call);

  // Counts an outermost region; returns the number of regions before.
  uint64_t countRegion();

  // For a profile: registers a value whose storage the region did not compute. The trace finds out
  // if only regions hold the value: when a region is entered, and when backward first unpacks.
  void watch(Value& value);

  Report report();
  Profile profile() const;

 private:
  void look(TraceTime now);
  std::vector<PythonStack> stacks() const;
  std::vector<TraceTime> durationsOfOperators() const;

  friend class RecordRef;  // writes its record, under the lock
  const uint64_t step_;
  const For what_;
  const int64_t start_;                // time of the clock, in nanoseconds
  std::atomic<bool> wasAsked_{false};  // backward has unpacked a value
  std::atomic<uint64_t> regions_{0};   // outermost regions so far
  TraceNames names_;
  mutable std::mutex mutex_;  // guards all members below
  Lines records_;
  std::deque<OperatorRecord> operators_;  // of a profile; of a report, the replays
  std::unordered_map<ValueRecord*, c10::weak_intrusive_ptr<Value>>
      watched_;  // values from outside, by record
  std::deque<ReportSpan> spans_;
  std::map<std::string_view, uint64_t> counted_;  // events, by name
};

template <class Change>
void RecordRef::update(const Change& change) const {
  std::lock_guard<std::mutex> lock(trace_->mutex_);
  change(record_);
}

}  // namespace ebb
