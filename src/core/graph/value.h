// A value: one state of one storage, its contents between two writes.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>

#include "conditions/fingerprint.h"
#include "ebb/export.h"
#include "ebb/policy.h"
#include "graph/home.h"
#include "graph/versions.h"
#include "hooks/slots.h"
#include "memory/arena.h"

namespace ebb {

struct Recipe;
class Stash;

// The parts that few values have.
struct RareParts : InArena {
  c10::intrusive_ptr<Stash> stash;  // see Note [Stored values]
  c10::Storage redefined;           // handles show this storage; see Note [Silent writes]
  Extras extras;                    // of plug-ins
  // Fingerprint of the value as a result of a custom operator on the CPU; 0: unknown.
  uint64_t fingerprint = 0;

  RareParts();
  ~RareParts();
};

// The rare parts of a value, in a block of memory that exists once one of them has been set.
class EBB_API Rare {
 public:
  const RareParts* operator->() const {
    return parts_ ? parts_.get() : &kNone;
  }
  template <class Part>
  void set(Part RareParts::* part, std::type_identity_t<Part> to) {
    if (!parts_ && to) {
      allocate();
    }
    if (parts_) {
      (*parts_).*part = std::move(to);
    }
  }
  template <class Part>
  void add(c10::intrusive_ptr<Part> extra) {
    if (!parts_) {
      allocate();
    }
    parts_->extras.set(std::move(extra));
  }
  // True if a plug-in needs the value until its region ends.
  bool waitsForEnd() const {
    return parts_ && parts_->extras.waitForEnd();
  }
  // True if a replay or a stash gives back only a part of the bytes.
  bool isPartial() const {
    return parts_ && parts_->extras.isPartial();
  }
  void clear() {
    parts_.reset();
  }

 private:
  void allocate();

  static const RareParts kNone;
  std::unique_ptr<RareParts> parts_;
};

// The state of a value follows from what the value owns.
enum class ValueState : uint8_t {
  Unneeded,      // nothing: an unused leaf, a freed value, or a buffer lost in a failed replay
  Recomputable,  // a recipe; Home::storage() may still hold the contents
  Held,  // bytes: a leaf that something needs, a saved value without a recipe, or a materialised
         // value
  Kept,  // bytes and a recipe: other code may write to the bytes; or see Note [Made each time]
  Away,  // a stash: see Note [Stored values]
};

// The handles on a value and the recipes that read it. Counted by hand, because a reference count
// also includes temporary references. Recipes and handles are made under the graph's lock, and die
// on any thread.
class Uses {
 public:
  // How many times autograd has packed the value.
  uint32_t packed() const {
    return packed_;
  }
  // How many handles own the value now.
  uint32_t handles() const {
    return handles_.load(std::memory_order_acquire);
  }
  // Counts a pack by autograd. Returns true for the first.
  bool notePacked() {
    return packed_++ == 0;
  }
  void gainHandle() {
    ++handles_;
  }
  void loseHandle() {
    --handles_;
  }

  // How many recipe inputs refer to the value.
  uint32_t readers() const {
    return read_ - unread_.load(std::memory_order_acquire);
  }
  void gainReader() {
    ++read_;
  }
  void loseReader() {
    unread_.fetch_add(1, std::memory_order_release);
  }

  // True if handles hold no storage: they rely on Home::bytes().
  bool relyOnBytes() const {
    return relyOnBytes_;
  }
  void letRelyOnBytes(bool rely = true) {
    relyOnBytes_ |= rely;
  }

  // True if a plug-in holds the storage too.
  bool isPinned() const {
    return isPinned_;
  }
  void pin(bool on) {
    isPinned_ = on;
  }

 private:
  std::atomic<uint32_t> handles_{0};
  std::atomic<uint32_t> unread_{0};  // recipe inputs destroyed
  uint32_t read_ = 0;                // recipe inputs created
  uint32_t packed_ : 30 = 0;
  bool relyOnBytes_ : 1 = false;
  bool isPinned_ : 1 = false;
};

// The fate of a value's bytes if something needs them, and the reason.
class ValueDecision {
 public:
  // True if a store has yet to take the bytes.
  bool isDue() const {
    return due_;
  }
  void setDue(bool due) {
    due_ = due;
  }

  // True unless the value is recomputed: ebb then holds or stores the bytes once autograd packs the
  // value or a recipe reads it. Not related to ValueState::Kept.
  bool isKept() const {
    return !recomputes(decision_);
  }
  // See Note [Made each time]
  bool isMadeEachTime() const {
    return decision_ == Decision::RecomputeEachTime;
  }
  Decision chosen() const {
    return decision_;
  }
  // True if the bytes are kept because of the policy.
  bool isSaved() const {
    return isKept() && byPolicy_;
  }

  // Sets the decision. `policy`: the policy made it.
  void decide(Decision verdict, bool policy = true) {
    decision_ = verdict;
    byPolicy_ = policy && !recomputes(verdict);
    due_ = isStored(verdict);
  }

  // The bytes must not be freed, whatever the policy says. A store may still take them.
  void mustBeKept() {
    if (!isKept()) {
      decide(Decision::Save, false);
    }
  }

  // No store takes the bytes: the value is recomputed if it has a recipe, else the bytes stay.
  void undo(bool hasRecipe) {
    decision_ = hasRecipe ? Decision::Recompute : Decision::Save;
    byPolicy_ = byPolicy_ && !hasRecipe;
    due_ = false;
  }

 private:
  Decision decision_ = Decision::Recompute;
  bool byPolicy_ : 1 = false;
  bool due_ : 1 = false;
};

// Facts about a value. The recorder sets most of the facts when it first sees the value.
struct StateFacts {
  uint16_t rule = UINT16_MAX;    // the policy's deciding rule; see Verdict::rule
  uint8_t opaque = 0;            // opaque writes in progress
  bool madeHere : 1 = false;     // the region made the storage; see Note [Results that others hold]
  bool writtenHere : 1 = false;  // a leaf from outside, in a state that this region wrote
  // A leaf that was written unseen before its bytes were copied.
  bool changedBeforeCopy : 1 = false;
  bool collectiveRunning : 1 = false;  // see Note [Communication]
  bool unfilled : 1 = false;           // uninitialised memory, as long as the fingerprint matches
  bool isEarlierResult : 1 = false;    // a leaf that an earlier region of the thread computed
  // Packed through a tensor whose version does not show all writes: an inner tensor of a wrapper
  // subclass, or an alias with a counter of its own. Eager's backward sees such writes, so handles
  // show the new contents.
  bool showsWrites : 1 = false;
  // An observer compares each replay of the value with its storage, and may read the value when the
  // storage is freed. So ebb replays the value even while the storage lives.
  bool compared : 1 = false;
};

// GraphStreams' notes about the bytes.
struct StreamsOfBytes {
  uint8_t madeOn = 0;     // number of the stream on which ebb made the bytes; 0: none
  uint8_t orderedOn = 0;  // bits of the streams that have waited for `madeOn`
};

// Note [Ownership]
//   autograd SavedVariable -> Handle -> Value -> Recipe -> input Values -> ...   strong, acyclic
//   Recipe -> outputs                                                            weak
//   Value -> StorageImpl (`Home::storage`)                                       weak
//   Value -> Storage (`Home::bytes`)                          strong, only while it must be kept
//   Recorder's map: StorageImpl* -> Value                     strong, dropped when the region ends
// ebb tracks nothing globally: reference counting frees all memory. A weak reference also prevents
// reuse of the StorageImpl's address, so the map's key identifies a storage.
//
// A materialised value stays Held until nothing refers to it, so each op is replayed at most once.
// Note [Made each time] has the exceptions.
//
// The parts of a value are members and not pointers, so ebb allocates one block of memory for each
// value. Rare parts are in another block.
struct Value final : c10::intrusive_ptr_target, InArena {
  Value();
  ~Value() override;

  StreamsOfBytes streams;
  Rare rare;

  const Home& home() const {
    return home_;
  }
  Home& home() {
    return home_;
  }
  const ValueDecision& decision() const {
    return decision_;
  }
  ValueDecision& decision() {
    return decision_;
  }
  const Versions& versions() const {
    return versions_;
  }
  Versions& versions() {
    return versions_;
  }
  const StateFacts& facts() const {
    return facts_;
  }
  StateFacts& facts() {
    return facts_;
  }
  const Uses& uses() const {
    return uses_;
  }
  Uses& uses() {
    return uses_;
  }

  ValueState state() const {
    return rare->stash                ? ValueState::Away
           : home_.bytes() && recipe_ ? ValueState::Kept
           : home_.bytes()            ? ValueState::Held
           : recipe_                  ? ValueState::Recomputable
                                      : ValueState::Unneeded;
  }

  // How to recompute the value; null for a leaf.
  const c10::intrusive_ptr<Recipe>& recipe() const {
    return recipe_;
  }
  void setRecipe(c10::intrusive_ptr<Recipe> recipe);

  // The stash, or null. See Note [Stored values].
  const c10::intrusive_ptr<Stash>& stash() const {
    return rare->stash;
  }
  // The data that a plug-in has attached to the value; null if there is none.
  template <class Part>
  Part* extra() const {
    return rare->extras.get<Part>();
  }

  // From now on `away` stands for the bytes.
  void putAway(c10::intrusive_ptr<Stash> away);
  // Drops the stash without bringing its bytes back.
  void dropStash();

  // Sets the bytes, recomputed or back from a stash. `onlyOurs`: no other code can write to them.
  void restore(c10::Storage made, bool onlyOurs);

  // Records the storage and version of `tensor` as this state's.
  void stamp(const at::Tensor& tensor);

  // If the storage is gone, returns true, and releases what torch keeps allocated for the weak
  // reference and for the version counter. Does nothing for a compared value.
  bool releaseGone();

  // The storage has another state from now on. Handles show `now`, as eager's saved tensors do.
  void showInstead(const c10::Storage& now);

  // A storage that has this value's bytes now: one that ebb holds, or one that other code keeps
  // alive and has not written. Null if there is neither, so at most a recipe or a stash is left.
  // Null for a compared value with a recipe, even if its storage lives.
  c10::Storage available() const;

  void release_resources() override;

 private:
  // In this order, small members fill the padding of larger ones.
  [[no_unique_address]] Home home_;
  ValueDecision decision_;
  [[no_unique_address]] Versions versions_;
  StateFacts facts_;
  Uses uses_;
  c10::intrusive_ptr<Recipe> recipe_;
};

// True if only handles refer to `value`: no recipe, and no open region.
bool onlyHandlesOwn(const c10::intrusive_ptr<Value>& value);

// True if the fingerprint shows that the leaf's `storage` has changed since the fingerprint was
// taken.
bool hasChanged(const Value& value, const c10::Storage& storage, FingerprintOf what);

}  // namespace ebb
