// A value: one state of one storage, its contents between two writes.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "ebb/policy.h"
#include "ebb/verify.h"
#include "graph/saved_slice.h"
#include "memory/arena.h"
#include "report/journal.h"

namespace ebb {

struct Recipe;
struct Witness;
class Stash;
struct Rows;

// A version counter and its version at one time. See Note [Version stamps].
struct VersionStamp {
  c10::VariableVersion counter;  // outlives the tensor; disabled for an inference tensor
  uint32_t version = 0;

  // True if the counter has not moved since.
  bool holds() const {
    return !counter.enabled() || counter.current_version() == version;
  }
};

// An entry of a value's list of counters.
struct CounterStamp : VersionStamp, InArena {
  ~CounterStamp() {
    while (next) {
      next = std::move(next->next);  // a loop instead of recursion: the list may be long
    }
  }
  std::unique_ptr<CounterStamp> next;
};

// The state of a value follows from what the value owns.
enum class ValueState : uint8_t {
  Unneeded,      // nothing: an unused leaf, a freed value, or a buffer lost in a failed replay
  Recomputable,  // a recipe; `home` may still hold the contents
  Held,          // bytes: a leaf that something needs, or a materialised value
  Kept,          // both: other code may write to the bytes; or see Note [Made each time]
  Away,          // a stash: offloaded or paged, see Note [Offloaded values]
};

// Note [Ownership]
//   autograd SavedVariable -> Handle -> Value -> Recipe -> input Values -> ...   strong, acyclic
//   Recipe -> outputs                                                            weak
//   Value -> StorageImpl (`home`)                                                weak
//   Value -> Storage (`bytes`)                                strong, only while it must be kept
//   Recorder's map: StorageImpl* -> Value                     strong, dropped when the region ends
// ebb tracks nothing globally: reference counting frees all memory. A weak reference also prevents
// reuse of the StorageImpl's address, so the map's key identifies a storage.
//
// A materialised value stays Held until nothing refers to it, so each op is replayed at most once.
// For the exceptions see Note [Made each time].
//
// Value has many members, so that each storage that an op produced needs one block of memory. Rare
// members are behind a pointer.
struct Value final : c10::intrusive_ptr_target, InArena {
  Value();
  ~Value() override;

  c10::weak_intrusive_ptr<c10::StorageImpl> home{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::Storage bytes;                 // the bytes, if ebb holds them; else null
  c10::intrusive_ptr<Recipe> recipe;  // how to recompute the value; null for a leaf
  VersionStamp written;               // version of the last writer of the storage
  c10::intrusive_ptr<Stash> stash;    // see Note [Offloaded values]; else null
  std::unique_ptr<SavedSlice> slice;  // the part that is or will be in the stash; null: all
  std::unique_ptr<Rows> rows;         // see Note [Rows]; null: valid rows are unknown
  c10::Storage redefined;             // see Note [Silent writes]; else null
  // Counters of other writers of this storage: aliases with their own counters, such as the results
  // of unsafe_chunk. Null for nearly every value.
  std::unique_ptr<CounterStamp> otherCounters;
  std::unique_ptr<Witness> witness;  // null outside verify mode
  EntryPtr entry;                    // null unless reports are recorded; see Note [The journal]
  const void* address = nullptr;     // where the bytes were; see living()
  size_t nbytes = 0;                 // size of the storage in this state
  uint64_t fingerprint = 0;          // of a kept leaf; see Note [Fingerprints of leaves]
  uint32_t packed = 0;               // handles created on this value
  std::atomic<uint32_t> handles{0};  // handles that exist and own this value
  uint32_t read = 0;                 // recipe inputs created; see recipeReaders()
  std::atomic<uint32_t> unread{0};   // recipe inputs destroyed
  uint16_t rule = UINT16_MAX;        // the policy's deciding rule; see Verdict::rule
  uint8_t opaque = 0;                // opaque writes in progress
  uint8_t madeOn = 0;     // GraphStreams' number of the stream on which ebb made `bytes`; 0: none
  uint8_t orderedOn = 0;  // streams ordered after `madeOn` and known to the allocator
  Decision decision = Decision::Recompute;  // the fate of the bytes if something needs them
  bool madeHere = false;         // an op inside the region made it: no external side effect
  bool backsHandles = false;     // handles hold no storage: they rely on `bytes`
  bool isPrivate = false;        // only ebb writes the buffer `bytes`
  bool byPolicy : 1 = false;     // the policy decided; else the decision was forced
  bool due : 1 = false;          // the bytes have yet to leave, as decided
  bool writtenHere : 1 = false;  // a leaf from outside, in a state that this region wrote
  bool tampered : 1 = false;     // a leaf that was written unseen before its bytes were copied
  bool underWay : 1 = false;     // see Note [Communication]
  bool superseded : 1 = false;   // the storage was written since: `home` holds another state
  bool unfilled : 1 = false;     // uninitialised memory, as long as the fingerprint matches
  bool heldAhead : 1 = false;    // the graph's Lookahead holds the storage too
  bool isResult : 1 = false;     // a leaf that an earlier region of the thread computed
  // Packed through a tensor whose version does not show all writes: a part of a wrapper, or an
  // alias with a counter of its own. Eager's backward sees such writes, so handles show the new
  // contents.
  bool follows : 1 = false;
  bool wasLast : 1 = false;  // dropped the last reference to bytes from outside

  ValueState state() const {
    return stash             ? ValueState::Away
           : bytes && recipe ? ValueState::Kept
           : bytes           ? ValueState::Held
           : recipe          ? ValueState::Recomputable
                             : ValueState::Unneeded;
  }

  // True if the decision is Save, Offload or Page: ebb then holds or sends the bytes once autograd
  // packs the value or a recipe reads it. Not related to ValueState::Kept.
  bool isKept() const {
    return !recomputes(decision);
  }
  // See Note [Made each time]
  bool isMadeEachTime() const {
    return decision == Decision::RecomputeEachTime;
  }
  bool isSaved() const {
    return isKept() && byPolicy;
  }
  bool isPaged() const {
    return decision == Decision::Page;
  }

  // Sets the decision. `policy` is false if the policy did not make it.
  void decide(Decision verdict, bool policy = true);

  // The decision becomes SAVE: the bytes stay in memory.
  void stay();

  // The bytes must not be freed, whatever the policy says. OFFLOAD and PAGE still apply.
  void mustBeKept();

  // The bytes do not leave: the value is recomputed if it has a recipe, else the bytes stay.
  void undoDecision();

  // Takes over the decision of `before`, the saved state before a write.
  void inherit(const Value& before);

  // How many recipe inputs refer to this value. Counted by hand, because a reference count also
  // includes temporary references. Recipes are written under the graph's lock, and die on any
  // thread.
  uint32_t recipeReaders() const {
    return read - unread.load(std::memory_order_acquire);
  }
  void gainReader() {
    ++read;
  }
  void loseReader() {
    unread.fetch_add(1, std::memory_order_release);
  }

  // From now on `away` stands for the bytes.
  void send(c10::intrusive_ptr<Stash> away);

  // Sets the recomputed or returned bytes. `onlyOurs`: no other code can write to them.
  void materialise(c10::Storage made, bool onlyOurs);

  // Sets recomputed bytes without other writers, to be freed again.
  void materialiseInPassing(c10::Storage made);
  // Frees the bytes set by materialiseInPassing().
  void giveUpAgain();

  // Records the storage and version of `tensor` as this state's.
  void stamp(const at::Tensor& tensor);

  // Takes over what `before` knew of other counters of the storage.
  void inheritCounters(const Value& before);

  // True if no counter of a writer has moved since.
  bool versionHolds() const {
    return written.holds() && (otherCounters == nullptr || otherVersionsHold());
  }
  bool otherVersionsHold() const;

  // From now on `seen` must not move.
  void learn(const c10::VariableVersion& seen);
  // `seen` must still show `at`, its version in this state.
  void learn(const c10::VariableVersion& seen, uint32_t at);

  // `seen` may have moved by one since.
  void allowOne(const c10::VariableVersion& seen);

  // True if `seen` is the counter of a known writer of the storage.
  bool knows(const c10::VariableVersion& seen) const;

  // The storage of this value, if other code keeps it alive, it still has its memory, and ebb has
  // seen no write to it. A tensor with a counter of its own may have written to it.
  c10::Storage living() const;

  // The storage that has this value's bytes now: `bytes`, or the storage that other code keeps
  // alive, if it was not written. Null if neither exists, so that only the recipe is left. In
  // verify mode, null for a value with a recipe even if its storage lives.
  c10::Storage available() const;

  // Drops the strong reference to the bytes. `home` refers to their storage.
  void moveHome();

  void release_resources() override;

 private:
  void noteEnd();
};

// True if only handles refer to `value`: no recipe, and no open region.
bool onlyHandlesOwn(const c10::intrusive_ptr<Value>& value);

// True if, by the fingerprint, `storage` of the leaf `value` has changed since a recipe first read
// it.
bool hasChanged(const Value& value, const c10::Storage& storage, VerifyMode mode);

// Identifies the counter object, unlike the counter's interface; null for a disabled counter.
inline const void* identityOf(const c10::VariableVersion& counter) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));  // the counter is one intrusive_ptr
  const void* identity = nullptr;
  std::memcpy(&identity, static_cast<const void*>(&counter), sizeof(void*));
  return identity;
}

inline bool sameCounter(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  return identityOf(a) == identityOf(b);
}

}  // namespace ebb
