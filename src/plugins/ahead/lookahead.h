// State of a graph for replays ahead of backward.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "graph/graph.h"
#include "graph/value.h"
#include "hooks/observer.h"
#include "hooks/store.h"

namespace ebb {

// Process-wide limit for the bytes of recomputable values that are replayed ahead, or that stay in
// memory after packing until the thread enters the next outermost region. See Note [Replays ahead
// of backward].
struct AheadBudget {
  // Returns false, and takes nothing, if the total would exceed the limit.
  bool take(size_t nbytes);

  std::atomic<size_t> limit{0};
  std::atomic<size_t> taken{0};
  std::atomic<size_t> most{0};  // peak of `taken`
};
extern constinit AheadBudget aheadBudget;

// How far the replay ahead of a graph has come.
enum class AheadState : uint8_t {
  Recorded,  // nothing has been done ahead
  Begun,     // a replay ahead has begun, and not all values are materialised
  Done,      // all values have been materialised
  Stopped,   // a replay ahead has ended early: some value cannot be materialised ahead
  Reached,   // backward has reached the graph
  Checked,   // as Reached, and no leaf that was read ahead has been written
};

// The outcome of a region that could be replayed ahead of backward, as the members of ReportAhead.
enum class AheadFate : uint8_t { InTime, Late, InVain, Held, Stopped };
constexpr std::array<const char*, 5> kAheadFates{
    "regions in time", "regions late", "regions in vain", "regions held", "regions stopped"};

// Process-wide counts of how replays ahead ended.
struct AheadCounts {
  std::array<std::atomic<uint64_t>, kAheadFates.size()> graphs{};  // by AheadFate
  std::atomic<uint64_t> failures{0};                               // replays that raised

  uint64_t of(AheadFate fate) const { return graphs[static_cast<size_t>(fate)].load(); }
};
extern constinit AheadCounts aheadCounts;

// The facts that a replay ahead leaves for the time when backward reaches this graph.
struct EBB_API OnArrival {
  // A leaf that an operator has read ahead.
  struct ReadLeaf {
    VersionStamp stamp;
    const std::string* op;  // the operator's name, which outlives this
  };

  // Called before a replay ahead of the operator `op` reads `leaf`. Remembers the leaf's version:
  // see Note [Writes under a replay ahead].
  void hasRead(const Value& leaf, const std::string& op);

  // Finds a leaf whose version counter has moved since a replay ahead read the leaf. Returns the
  // name of the operator that read the leaf; null if there is no such leaf.
  const std::string* readerOfWritten() const;

  std::vector<c10::intrusive_ptr<Stash>> cameBack;  // fetched ahead; see Stash::awaitsBackward()
  std::vector<ReadLeaf> leavesRead;
};

// The graphs that backward may need after this one.
struct EarlierGraphs {
  std::vector<WeakGraph> read;                      // whose results this graph reads
  WeakGraph previous{c10::intrusive_ptr<Graph>()};  // that the thread recorded before this one

  std::vector<WeakGraph> next() const {
    return read.empty() ? std::vector<WeakGraph>{previous} : read;
  }
};

// Note [Replays ahead of backward]
// While backward works on one region, another thread materialises values for the handles of the
// next region. Candidates for the next region are the regions whose results the current region
// reads; the latest recorded candidate is first, as in autograd. If results pass through code
// between regions, ebb takes the previously recorded region. As far as the limit allows, ebb keeps
// a region's packed tensors until the same thread enters the next outermost region. So the last
// region, which backward needs first, needs no replay. The recorder treats ebb's reference to such
// a tensor as a reference of the program. Bytes held after packing and bytes replayed ahead count
// against one limit until backward reaches the graph or the graph dies. If the program also held a
// storage when the region closed, the program may since have written to the storage without moving
// a version. Handles show such a storage, as eager's saved tensors do. Recipes do not read the
// storage: a replay recomputes the value.
//
// The graph's lock guards all members of Lookahead that are not atomic. A graph has no Lookahead if
// both replay ahead and keepWhileThereIsRoom() are off, nor while a profile is recorded, nor in
// verify mode, which compares a replay at the time when backward needs the value.
//
// Note [Writes under a replay ahead]
// The program may write to a leaf while a replay reads the leaf. A version moves only after the
// write's kernel returns, so a replay may read a half-written leaf and see the same version before
// and after. When backward arrives, all earlier writes of the program are complete. At that time
// ebb checks the versions of all leaves read ahead once more. If a version has moved, ebb raises
// the error that a replay at that time would raise.
struct EBB_API Lookahead final : Extra {
  static const SlotNumber kSlot;

  // A value packed by autograd that must be recomputed.
  struct Wanted {
    c10::weak_intrusive_ptr<Value> value;
    c10::Storage held;  // keeps the value's bytes; null: does not keep them
    size_t nbytes;
    bool wasShared = true;  // other code held the storage when the region closed
  };

  // `hasRoom`: see Note [Kept while there is room].
  Lookahead(uint64_t number, const Observers& observers, bool hasRoom);
  ~Lookahead() override;

  // Autograd has packed `value`, whose bytes are in `storage`.
  void wants(Value& value, const c10::Storage& storage);

  // Releases the held storages: the thread has entered another region.
  void dropHeld();

  // Moves the held storages on `device` that may be freed at once to `freed`: see Note [Memory
  // given back]. Returns the bytes that nothing else holds.
  size_t giveBackOn(c10::Device device, std::vector<c10::Storage>& freed);

  // Bytes of all held storages.
  size_t keptBytes() const;

  bool hasArrived() const { return state.load(std::memory_order_acquire) == AheadState::Checked; }
  // Backward has arrived. Values take over the held storages.
  void reached();

  // This graph reads results of `other`.
  void reads(const WeakGraph& other);

  // As AheadBudget::take() and giveBack(). The bytes count as this graph's.
  bool take(size_t nbytes);
  void giveBack(size_t nbytes);

  // Counts `fate` for the process, and tells the observers.
  void became(AheadFate fate) const;

  // Recording has ended. Notes which held storages the program holds too.
  void close();

  // Process-wide number of close() calls so far.
  static uint64_t closings();

  const uint64_t number;       // process-wide, in the order of recording
  const Observers& observers;  // the graph's
  const bool hasRoom;          // held bytes do not count against the limit
  // Process-wide, in the order of closing, from 1. Set before the worker can know the graph, and
  // never again, so the worker reads it without the lock.
  uint64_t closed = 0;
  std::vector<Wanted> wanted;  // in the order of packing
  EarlierGraphs earlier;
  OnArrival onArrival;
  size_t taken = 0;                // bytes taken from the budget
  c10::Device device{c10::kCPU};   // of the value packed first
  std::atomic<bool> holds{false};  // `wanted` holds bytes that could be freed
  std::atomic<bool> asked{false};  // backward is about to unpack, so the worker stops replaying
  std::atomic<AheadState> state{AheadState::Recorded};
};

// The graph's; null if nothing of the graph is replayed ahead or held.
inline Lookahead* lookaheadOf(const Graph& graph) { return graph.extras.get<Lookahead>(); }

}  // namespace ebb
