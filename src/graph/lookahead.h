// What a graph has so that it can be replayed before backward asks.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "graph/value.h"
#include "memory/stash.h"
#include "report/journal.h"

namespace ebb {

struct Graph;
using WeakGraph = c10::weak_intrusive_ptr<Graph>;

// Bytes of the whole process that are there before backward needs them.
class EBB_API AheadBudget {
 public:
  static AheadBudget& get();

  // False, and nothing is taken, if there would be more than the limit.
  bool take(size_t nbytes);
  void giveBack(size_t nbytes) {
    taken_.fetch_sub(nbytes);
  }

  void setLimit(size_t nbytes) {
    limit_.store(nbytes);
  }
  size_t taken() const {
    return taken_.load();
  }
  size_t most() const {
    return most_.load();
  }

 private:
  std::atomic<size_t> limit_{0};
  std::atomic<size_t> taken_{0};
  std::atomic<size_t> most_{0};
};

// How far a graph is.
enum class AheadState : uint8_t {
  Recorded,  // nothing has been done ahead
  Begun,     // some of it has
  Done,      // all of it has
  Stopped,   // the rest cannot be done ahead
  Reached,   // backward asks for it by itself
};

// What became of graphs, in the whole process.
struct AheadCounts {
  std::array<std::atomic<uint64_t>, kAheadFates> graphs{};  // by AheadFate
  std::atomic<uint64_t> failures{0};                        // replays that raised

  uint64_t of(AheadFate fate) const {
    return graphs[static_cast<size_t>(fate)].load();
  }

  static AheadCounts& get();
};

// Note [Replays ahead of backward]
// While backward works on one region, another thread materialises what handles wait for in the one
// that comes next. Which one that is follows from the data: a region reads results of those before
// it, and autograd takes the latest first. Where results pass through other code in between, the
// region that was recorded before is taken.
// What autograd packs in a region is not given up before the next outermost region is entered on
// its thread, as far as the limit allows: the region that backward meets first is whole. To the
// recorder that is no different from a program that holds the tensors.
// The bytes of both count against one limit until backward reaches the graph, or it dies.
// If the program also held a storage when the region closed, it may have written to that storage in
// ways that move no version, and then dropped it. Handles then show the storage, as eager's saved
// tensors do, and recipes that read the value recompute it first.
//
// Its members are many, and what the graph itself would have. Guarded by the graph's lock, but for
// what is atomic. Null while replays do not run ahead, and in verify mode, which compares each
// replay where backward would need it.
//
// Note [Writes under a replay ahead]
// The program may write to a leaf while a replay reads it, and a version moves only when the
// write's kernel has returned: what was replayed may have read half of it, with the same version
// before and after. When backward arrives, what the program did before that is done. So the
// versions of all leaves that were read are looked at again then, and if one has moved that is the
// error which a replay that begins then would raise.
//
// Note [Side streams]
// On a device a replay ahead runs on the graph's own stream, where backward will run, which hides
// the host's time; or on a stream beside it, which hides the kernels' too. That one waits for the
// other when a region begins that was recorded since it last did, and backward's for it when
// backward arrives; memory is told of both, as in Note [Bytes of several streams].
struct EBB_API Lookahead {
  // A value that autograd has packed, and that is to be made again.
  struct Wanted {
    c10::weak_intrusive_ptr<Value> value;
    c10::Storage held;  // its bytes, if it is not given up
    size_t nbytes;
    bool wasShared = true;  // others held the storage when the region closed
  };

  // `hasRoom`: see Note [Kept while there is room].
  Lookahead(uint64_t number, JournalPtr journal, bool hasRoom);
  ~Lookahead();
  Lookahead(const Lookahead&) = delete;
  Lookahead& operator=(const Lookahead&) = delete;

  // Autograd has packed `value`, whose bytes are in `storage`.
  void wants(Value& value, const c10::Storage& storage);

  // Gives up what was not given up: another region has been entered.
  void dropHeld();

  // What was not given up; of the host's memory, or of devices'.
  size_t keptBytes() const;
  size_t keptBytes(bool ofHost) const;

  // Backward is there. What was held is the values' own from now on. Gives those that are alive.
  std::vector<c10::intrusive_ptr<Value>> reached();

  // This graph reads what `other` has made.
  void reads(const WeakGraph& other);

  bool take(size_t nbytes);
  void giveBack(size_t nbytes);

  // A leaf that an operator has read ahead.
  struct ReadLeaf {
    VersionStamp stamp;
    const std::string* op;  // its name, which stays
  };

  // A replay ahead reads `leaf`: see Note [Writes under a replay ahead].
  void hasRead(const Value& leaf, const std::string& op);

  // The name of an operator of which an input has been written since, as far as versions tell; null
  // if there is none.
  const std::string* readerOfWritten() const;

  // Is counted, for the process and for the step's report.
  void became(AheadFate fate) const;

  // Recording has ended. Notes which of the held storages the program holds as well.
  void close();

  // How many have been closed so far, in the whole process.
  static uint64_t closings();

  const uint64_t number;          // in the order of recording, of the whole process
  const JournalPtr journal;       // the graph's
  const bool hasRoom;             // what it keeps does not count against the limit
  uint64_t closed = 0;            // in the order of closing, from 1
  std::vector<Wanted> wanted;     // in the order of packing
  std::vector<WeakGraph> before;  // whose results it reads; if it reads none's, the last before it
  std::vector<c10::intrusive_ptr<Stash>> cameBack;  // ahead, and await backward
  size_t taken = 0;                                 // of the budget
  std::optional<c10::Stream> side;   // on which it is replayed ahead, if not on backward's
  std::vector<ReadLeaf> leavesRead;  // see hasRead()
  c10::Device device{c10::kCPU};     // of what was packed first
  std::atomic<bool> holds{false};    // some bytes that could be given up
  std::atomic<bool> asked{false};    // somebody is about to ask for values: the worker leaves
  std::atomic<bool> arrived{false};  // backward is there, and inputs were looked at
  std::atomic<AheadState> state{AheadState::Recorded};
};

}  // namespace ebb
