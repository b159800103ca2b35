// A value: one state of one storage, what it held between two writes.
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

// A version counter and what it showed. See Note [Version stamps].
struct VersionStamp {
  c10::VariableVersion counter;  // outlives the tensor; disabled: of an inference tensor
  uint32_t version = 0;

  // Whether it has not moved since.
  bool holds() const {
    return !counter.enabled() || counter.current_version() == version;
  }
};

// One of a value's list.
struct CounterStamp : VersionStamp, InArena {
  ~CounterStamp() {
    while (next) {
      next = std::move(next->next);  // one after the other: the list may be long
    }
  }
  std::unique_ptr<CounterStamp> next;
};

// What a value owns says in which state it is.
enum class ValueState : uint8_t {
  Unneeded,      // nothing: a leaf that nothing has needed so far; one given up, or lost half way
  Recomputable,  // a recipe: it can be made again, and `home` may still hold it
  Held,          // bytes: a leaf that something needs, or a value that was materialised
  Kept,          // both: the policy keeps it, but others hold its storage too and may write to it;
                 // or a slice has made it in passing, see Note [Made each time]
  Away,          // a stash: offloaded or paged, see Note [Offloaded values]
};

// Note [Ownership]
//   autograd SavedVariable -> Handle -> Value -> Recipe -> input Values -> ...   strong, acyclic
//   Recipe -> outputs                                                            weak
//   Value -> StorageImpl (`home`)                                                weak
//   Value -> Storage (`bytes`)                                strong, only while it must be kept
//   Recorder's map: StorageImpl* -> Value                     strong, dropped when the region ends
// Nothing is tracked globally: memory dies by reference counting. A weak reference also keeps the
// StorageImpl's address from being reused, so the map's key is a true identity.
//
// Once materialised a value stays Held until nothing refers to it, so each op is replayed at most
// once; but for those of Note [Made each time].
//
// Its members are many, since there is one for each storage that an op made: it is one block of
// memory, and what most values lack is behind a pointer.
struct Value final : c10::intrusive_ptr_target, InArena {
  Value();
  ~Value() override;

  c10::weak_intrusive_ptr<c10::StorageImpl> home{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::Storage bytes;                 // the kept bytes; null unless kept
  c10::intrusive_ptr<Recipe> recipe;  // how to make it; null for a leaf
  VersionStamp written;               // by the tensor that it was last written through
  c10::intrusive_ptr<Stash> stash;    // see Note [Offloaded values]; null but for those
  std::unique_ptr<SavedSlice> slice;  // what the stash has, or will; null for all of it
  std::unique_ptr<Rows> rows;         // see Note [Rows]; null: which rows live is not known
  c10::Storage redefined;             // see Note [Silent writes]; null but for those
  // Counters of other tensors that have written this storage, as the results of unsafe_chunk do:
  // aliases with counters of their own. Null for nearly every value.
  std::unique_ptr<CounterStamp> otherCounters;
  std::unique_ptr<Witness> witness;  // null but in verify mode
  EntryPtr entry;                    // null but while reports are recorded; see Note [The journal]
  const void* address = nullptr;     // where its bytes were; see living()
  size_t nbytes = 0;                 // of the storage, in this state
  uint64_t fingerprint = 0;          // of a kept leaf; see Note [Fingerprints of leaves]
  uint32_t packed = 0;               // how many handles were made on it
  std::atomic<uint32_t> handles{0};  // how many of them exist and own it
  uint32_t read = 0;                 // by how many inputs of recipes; see recipeReaders()
  std::atomic<uint32_t> unread{0};   // how many of those are gone
  uint16_t rule = UINT16_MAX;        // of the policy, that decided on it; see Verdict::rule
  uint8_t opaque = 0;                // how many writes that torch does not see are going on
  uint8_t madeOn = 0;     // the stream on which ebb made `bytes`; 0: none. GraphStreams' number
  uint8_t orderedOn = 0;  // streams that are known to come after that, and the memory of them
  Decision decision = Decision::Recompute;  // what happens to its bytes if something needs them
  bool madeHere = false;         // made by an op inside the region: not an external side effect
  bool backsHandles = false;     // handles on it hold no storage: they rely on `bytes`
  bool isPrivate = false;        // `bytes` is a buffer that only ebb writes
  bool byPolicy : 1 = false;     // its decision is the policy's word; else it has to be
  bool due : 1 = false;          // its bytes have yet to leave, as its decision says
  bool writtenHere : 1 = false;  // a leaf from outside, in a state that this region wrote
  bool tampered : 1 = false;     // a leaf that had changed unseen when its bytes were copied
  bool underWay : 1 = false;     // see Note [Communication]
  bool superseded : 1 = false;   // the storage has been written since: `home` holds another state
  bool unfilled : 1 = false;     // memory that nobody has filled, while its fingerprint holds
  bool heldAhead : 1 = false;    // its graph's Lookahead holds the storage too
  bool isResult : 1 = false;     // a leaf that an earlier region of the thread has computed
  // Packed through a tensor whose version does not show all writes: a part of a wrapper, or an
  // alias with a counter of its own. Eager's backward sees such writes, so handles follow them.
  bool follows : 1 = false;
  bool wasLast : 1 = false;  // has ended, and nobody else had what it was given from outside

  ValueState state() const {
    return stash             ? ValueState::Away
           : bytes && recipe ? ValueState::Kept
           : bytes           ? ValueState::Held
           : recipe          ? ValueState::Recomputable
                             : ValueState::Unneeded;
  }

  // Whether its bytes are held, or sent, when autograd packs it or a recipe reads it.
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

  // The policy has decided; or something else has, for it.
  void decide(Decision verdict, bool policy = true);

  // Its bytes stay where they are.
  void stay();

  // It has to be kept, whatever the policy says; what is due to leave stays so.
  void mustBeKept();

  // It does not leave: it is made again if it can be, else kept.
  void undoDecision();

  // Like the state before a write, on which the policy had decided that it be saved.
  void inherit(const Value& before);

  // How many inputs of recipes it is. Counted by hand, since reference counts say also what looks
  // at it just now. Recipes are written under the graph's lock, and die on any thread.
  uint32_t recipeReaders() const {
    return read - unread.load(std::memory_order_acquire);
  }
  void gainReader() {
    ++read;
  }
  void loseReader() {
    unread.fetch_add(1, std::memory_order_release);
  }

  // Its bytes are elsewhere from now on.
  void send(c10::intrusive_ptr<Stash> away);

  // Its bytes are made again, or back. `onlyOurs`: nobody else can write to them.
  void materialise(c10::Storage made, bool onlyOurs);

  // Its bytes are made again, by nobody else to be written, and will be given up.
  void materialiseInPassing(c10::Storage made);
  void giveUpAgain();

  // Stamps `tensor`'s storage and version as this state's.
  void stamp(const at::Tensor& tensor);

  // Takes over what `before` knew of other counters on the same storage.
  void inheritCounters(const Value& before);

  // No counter that has written this storage has moved since.
  bool versionHolds() const {
    return written.holds() && (otherCounters == nullptr || otherVersionsHold());
  }
  bool otherVersionsHold() const;

  // From now on `seen` must not move either, nor from `at` if it showed that in this state.
  void learn(const c10::VariableVersion& seen);
  void learn(const c10::VariableVersion& seen, uint32_t at);

  // `seen` may have moved by one since.
  void allowOne(const c10::VariableVersion& seen);

  // Whether `seen`, the counter of a tensor that shows the storage, is one that has written it.
  bool knows(const c10::VariableVersion& seen) const;

  // The storage this state was made in, if it lives, has not got other memory, and no write to it
  // was seen. Somebody may have written through a tensor with a counter of its own.
  c10::Storage living() const;

  // The storage that holds this state now: the kept bytes, or the living storage if nobody has
  // written to it. Null if neither; the recipe is then the only way. In verify mode a value with a
  // recipe is made again though its storage lives.
  c10::Storage available() const;

  // From now on its bytes are whoever's that hold their storage.
  void moveHome();

  void release_resources() override;

 private:
  void noteEnd();
};

// Whether nothing refers to `value` but handles: no recipe, and no region that is open.
bool onlyHandlesOwn(const c10::intrusive_ptr<Value>& value);

// Whether `storage`, which holds the leaf `value`, has other contents than when a recipe first read
// it, as far as the fingerprint tells.
bool hasChanged(const Value& value, const c10::Storage& storage, VerifyMode mode);

// Which object a counter is, which its interface does not tell; null if it is disabled.
inline const void* identityOf(const c10::VariableVersion& counter) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void*));  // it is one intrusive_ptr
  const void* identity = nullptr;
  std::memcpy(&identity, static_cast<const void*>(&counter), sizeof(void*));
  return identity;
}

inline bool sameCounter(const c10::VariableVersion& a, const c10::VariableVersion& b) {
  return identityOf(a) == identityOf(b);
}

}  // namespace ebb
