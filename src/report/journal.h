// What became of each value of a step, for ebb::reports().
#pragma once

#include <c10/core/Event.h>
#include <c10/core/ScalarType.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/util/DimVector.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ebb/profile.h"
#include "ebb/report.h"
#include "report/python_stacks.h"

namespace ebb {

// Note [The journal]
// While reports are recorded each state of each storage that a region knows has a line in its
// step's journal, from the op that made it until the last value and handle that knows it has gone.
// Lines are written under the journal's lock; they never move. Nothing that ebb decides depends on
// them. While reports are not recorded a graph has no journal, and a value's entry is null.
enum class Fate : uint8_t {
  Unneeded,    // nothing needs it
  Saved,       // kept by the policy's word
  Kept,        // kept because it cannot be made again; `reason` tells why
  Recomputed,  // autograd packed it, and it was dropped
  Offloaded,   // sent to the host
  Paged,       // its live rows went to pages
  Escaped,     // could be dropped, but the program held it when the region ended
  Result,      // nothing in autograd needs it, but the program held it when the region ended
  Copied,      // a copy of what a write was about to change
  Outside,     // a parameter, an input: made by somebody else, and held by them
};

// What became of a region that could be replayed ahead of backward: as the members of ReportAhead.
enum class AheadFate : uint8_t { InTime, Late, InVain, Held, Stopped };
constexpr size_t kAheadFates = 5;

using JournalTime = int64_t;  // nanoseconds since the step began
constexpr JournalTime kNever = -1;

// What is known of one value: its members are many, as columns of a report are.
struct Line {
  const std::string* region = nullptr;  // strings are the journal's
  const std::string* module = nullptr;
  const std::string* op = nullptr;
  const std::string* rule = nullptr;  // null: the policy was not asked
  const char* reason = nullptr;       // why it is not recomputed though the policy would; else null
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::DimVector sizes;           // of the tensor that was made
  size_t nbytes = 0;              // of its storage
  const void* address = nullptr;  // of its bytes
  Fate fate = Fate::Unneeded;
  bool packed = false;    // by autograd
  bool wasLast = false;   // came from outside, and nobody else had it in the end
  uint32_t storages = 0;  // that handles of autograd hold, of what came from outside
  uint32_t replays = 0;
  uint32_t replaysAhead = 0;   // of replays: before backward asked
  JournalTime replayTime = 0;  // of the host, in kernels called again
  JournalTime aheadTime = 0;   // of replayTime
  JournalTime made = 0;
  JournalTime letGo = kNever;    // of what came from outside: seen to be held by regions alone
  JournalTime asked = kNever;    // backward unpacked it
  JournalTime sent = kNever;     // to the host
  JournalTime back = kNever;     // made again, or fetched
  const void* backAt = nullptr;  // where its bytes were then
  JournalTime ended = kNever;    // nothing knows it any more
  int64_t rows = 0;              // for profiles: as in ProfileValue
  int64_t liveRows = 0;
  bool rowsMixed = false;
  bool wasRead = false;  // by a replay, of a report
  PythonStack stack;     // where it was made; null in profiles
};

// The time between two points of a device's stream.
struct DeviceTimer {
  explicit DeviceTimer(c10::Stream stream);
  void stop() {
    last.record(stream);
  }
  JournalTime elapsed();  // waits

  const c10::Stream stream;
  c10::Event first;
  c10::Event last;
};

// One call of an operator, for profiles: its members are many, one for each field there. One
// replay, for reports: what it read and made, and how long backward waited.
struct OperatorLine {
  const std::string* region = nullptr;
  const std::string* module = nullptr;
  const std::string* op = nullptr;
  uint64_t call = 0;  // Graph::numberInJournal
  JournalTime start = 0;
  JournalTime duration = 0;            // of the host
  std::unique_ptr<DeviceTimer> timer;  // of a device, if it ran there
  c10::SmallVector<Line*, 4> inputs;
  c10::SmallVector<Line*, 2> outputs;
  bool random = false;
  bool inplace = false;
  bool replayable = false;
  bool readsRows = false;
};

// The number of holders of a storage, from one region that holds it; null if the region does not.
struct Held {
  const c10::StorageImpl* storage = nullptr;
  size_t holders = 0;
};

// A stretch of work, for traces.
struct Span {
  const char* kind;  // as ReportSpan::kind
  const std::string* name;
  JournalTime start;
  JournalTime duration;
  uint64_t thread;
  size_t nbytes;
};

class Journal;
using JournalPtr = std::shared_ptr<Journal>;

// What a value and the handles on it have of their line. When the last of them goes, the line ends.
class Entry final : public c10::intrusive_ptr_target {
 public:
  Entry(JournalPtr journal, Line& line) : journal_(std::move(journal)), line_(line) {
  }
  ~Entry() override;

  // Calls `change` on the line, under the journal's lock.
  template <class Change>
  void update(const Change& change);

  Journal& journal() const {
    return *journal_;
  }

  Line* line() const {
    return &line_;
  }

 private:
  JournalPtr journal_;
  Line& line_;  // the journal's
};
using EntryPtr = c10::intrusive_ptr<Entry>;

// Notes that nobody but ebb held a storage from outside at its end. Null: reports are not recorded.
void noteLast(const EntryPtr& entry);

// Its members are many: lines, calls and spans are written under one lock.
class Journal final : public std::enable_shared_from_this<Journal> {
 public:
  enum class For : uint8_t { Report, Profile };
  explicit Journal(uint64_t step, For what = For::Report);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // How many exist.
  EBB_API static int64_t live();

  // Whether it is to know of each operator, and of each value to the end.
  bool isProfile() const {
    return what_ == For::Profile;
  }

  // True until the first storage gets a line. Takes no lock.
  bool isEmpty() const {
    return isEmpty_;
  }

  JournalTime now() const;

  // A string that lives as long as the journal.
  const std::string* intern(const std::string& text);

  // A string that lives as long: of a rule that has decided on something.
  const std::string* ruleThatDecided(const std::string& text);

  // Whether nobody has asked for this policy before. It lives as long as the journal.
  bool isNewPolicy(std::shared_ptr<const void> policy);

  // A rule that a policy has, in words.
  void addRule(const std::string& text);

  EntryPtr add(Line line);
  void add(const char* kind, const std::string& name, JournalTime start, size_t nbytes = 0);

  void add(AheadFate ofRegion);
  void add(OperatorLine call);

  // How many outermost regions had been entered before.
  uint64_t countRegion();

  // Asks whether anybody but regions holds what came from outside: when backward first unpacks,
  // when a report is made, and, for profiles, when a region is entered.
  void watch(const Entry& entry, std::function<Held()> look);
  void asked(const Entry& entry);

  Report report();
  Profile profile() const;

 private:
  void look(JournalTime now);
  std::vector<PythonStack> stacks() const;
  std::vector<JournalTime> durationsOfOperators() const;

  friend class Entry;  // writes its own line, under the lock
  const uint64_t step_;
  const For what_;
  const int64_t start_;  // of the clock, in nanoseconds
  std::atomic<bool> isEmpty_{true};
  std::atomic<bool> wasAsked_{false};  // backward has unpacked something
  mutable std::mutex mutex_;           // guards what follows
  std::deque<Line> lines_;
  std::vector<Line*> unused_;  // lines of values that nothing needed and nobody has any more
  std::deque<OperatorLine> operators_;                        // of a profile; of a report replays
  uint64_t regions_ = 0;                                      // outermost ones
  std::unordered_map<Line*, std::function<Held()>> watched_;  // what no region made, by its line
  std::deque<Span> spans_;
  std::array<uint64_t, kAheadFates> ahead_{};  // regions, by AheadFate
  std::unordered_set<std::string> strings_;
  std::set<std::shared_ptr<const void>> policies_;
  std::vector<const std::string*> rules_;       // of all policies
  std::set<const std::string*> decidingRules_;  // those that decided on something
};

template <class Change>
void Entry::update(const Change& change) {
  std::lock_guard<std::mutex> lock(journal_->mutex_);
  change(line_);
}

}  // namespace ebb
