// A value: one state of one storage, its contents between two writes.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "conditions/fingerprint.h"
#include "ebb/export.h"
#include "ebb/policy.h"
#include "graph/home.h"
#include "graph/versions.h"
#include "hooks/decider.h"
#include "hooks/slots.h"
#include "memory/arena.h"

namespace ebb {

struct LatestState;
struct Recipe;
class Stash;

// The parts that few values have.
struct RareParts : InArena {
  c10::intrusive_ptr<Stash> stash;    // see Note [Stored values]
  c10::Storage redefined;             // handles show this storage; see Note [Silent writes]
  Extras extras;                      // of plug-ins
  std::weak_ptr<LatestState> latest;  // see Note [Handles that follow]

  RareParts();
  ~RareParts();
};

// The state of a value follows from what the value owns.
enum class ValueState : uint8_t {
  Empty,         // nothing: an unused leaf, a freed value, or a buffer lost in a failed replay
  Recomputable,  // a recipe; Home::storage() may still hold the contents
  Held,  // bytes: a leaf that something needs, a saved value without a recipe, or a restored value
  Both,  // bytes and a recipe: other code may write to the bytes; or see Note [Made each time]
  Away,  // a stash: see Note [Stored values]
};

// The handles on a value and the recipes that read it. A reference count would also include
// temporary references. Recipes and handles are made under the graph's lock (a copy of a handle is
// not), and die on any thread. HandleOn and ReaderOf count them.
class Uses {
 public:
  // How many times autograd has packed the value.
  uint32_t packed() const { return packed_; }
  // How many handles own the value now.
  uint32_t handles() const { return handles_.load(std::memory_order_acquire); }
  // Autograd has packed the value. `showsWrites`: see showsWrites(). `relyOnBytes`: see
  // relyOnBytes(). Returns true for the first pack.
  bool notePacked(bool showsWrites, bool relyOnBytes) {
    showsWrites_ |= showsWrites;
    letRelyOnBytes(relyOnBytes);
    return packed_++ == 0;
  }
  void gainHandle() { ++handles_; }
  void loseHandle() { --handles_; }

  // How many recipe inputs refer to the value.
  uint32_t readers() const { return read_ - unread_.load(std::memory_order_acquire); }
  void gainReader() { ++read_; }
  void loseReader() { unread_.fetch_add(1, std::memory_order_release); }

  // True if handles hold no storage: they rely on Home::bytes().
  bool relyOnBytes() const { return relyOnBytes_; }
  void letRelyOnBytes(bool rely) { relyOnBytes_ |= rely; }

  // True if the value was packed through a tensor whose version does not show all writes: an inner
  // tensor of a wrapper subclass, or an alias with a counter of its own. Eager's backward sees such
  // writes, so handles show the new contents.
  bool showsWrites() const { return showsWrites_; }

  // True if a plug-in holds the storage too.
  bool isPinned() const { return isPinned_; }
  void pin(bool on) { isPinned_ = on; }

 private:
  std::atomic<uint32_t> handles_{0};
  std::atomic<uint32_t> unread_{0};  // recipe inputs destroyed
  uint32_t read_ = 0;                // recipe inputs created
  uint32_t packed_ : 29 = 0;
  bool relyOnBytes_ : 1 = false;
  bool showsWrites_ : 1 = false;
  bool isPinned_ : 1 = false;
};

// The fate of a value's bytes if something needs them, and the reason.
class ValueDecision {
 public:
  ValueDecision() = default;
  // `byPolicy`: the policy made the decision. `rule`: see Verdict::rule.
  explicit ValueDecision(Decision chosen, bool byPolicy = true, uint16_t rule = Verdict::kNoRule)
      : chosen_(chosen),
        byPolicy_(byPolicy && !recomputes(chosen)),
        due_(isStored(chosen)),
        rule_(rule) {}

  Decision chosen() const { return chosen_; }
  // The policy's deciding rule; see Verdict::rule.
  uint16_t rule() const { return rule_; }
  // True if a store has yet to take the bytes.
  bool isDue() const { return due_; }
  // True unless the value is recomputed: ebb then holds or stores the bytes once autograd packs the
  // value or a recipe reads it.
  bool isKept() const { return !recomputes(chosen_); }
  // True if the bytes are kept because of the policy.
  bool isSaved() const { return isKept() && byPolicy_; }
  // See Note [Made each time]
  bool isMadeEachTime() const { return chosen_ == Decision::RecomputeEachTime; }

  // The same decision, but a store has yet to take the bytes (`due`), or will not.
  ValueDecision withDue(bool due) const {
    ValueDecision now = *this;
    now.due_ = due;
    return now;
  }
  // This decision if it keeps the bytes; else the bytes stay, whatever the policy says.
  ValueDecision orKept() const {
    return isKept() ? *this : ValueDecision(Decision::Save, false, rule_);
  }
  // No store takes the bytes: the value is recomputed, or its bytes stay.
  ValueDecision withoutStore(bool isRecomputed) const {
    const Decision now = isRecomputed ? Decision::Recompute : Decision::Save;
    return ValueDecision(now, byPolicy_, rule_);
  }

 private:
  Decision chosen_ = Decision::Recompute;
  bool byPolicy_ : 1 = false;
  bool due_ : 1 = false;
  uint16_t rule_ = Verdict::kNoRule;
};

// Facts about a value. The recorder sets most of the facts when it makes the value.
struct StateFacts {
  uint8_t opaque = 0;            // opaque writes in progress
  bool madeHere : 1 = false;     // the region made the storage; see Note [Results that others hold]
  bool writtenHere : 1 = false;  // a leaf from outside, in a state that this region wrote
  bool isEarlierResult : 1 = false;    // a leaf that an earlier region of the thread computed
  bool inTransit : 1 = false;          // its op may still write: see Note [Communication]
  bool unfilled : 1 = false;           // uninitialised memory, as long as the fingerprint matches
  bool changedBeforeCopy : 1 = false;  // a leaf that was written unseen before it was copied
  // An observer compares each replay of the value with its storage, and may read the value when the
  // storage is freed. So ebb replays the value even while the storage lives.
  bool compared : 1 = false;

  // The facts of the state that a write leaves.
  StateFacts afterWrite() const {
    StateFacts after;
    after.opaque = opaque;
    after.madeHere = madeHere;
    after.writtenHere = !madeHere;
    after.isEarlierResult = isEarlierResult;
    return after;
  }
};

// GraphStreams' notes about the bytes.
struct StreamsOfBytes {
  uint8_t madeOn : 6 = 0;  // number of the stream on which ebb made the bytes; 0: none
  uint8_t place : 2 = 0;   // see Note [Bytes of a capture]
  uint8_t orderedOn = 0;   // bits of the streams that have waited for `madeOn`
};

// Note [Transitions of a value]
// Only these methods of Value change a value's state. The caller holds the graph's lock, unless no
// other thread knows the value yet. Handles and readers may be lost without the lock.
//
//   method        from             to                      when
//   Value         -                Empty                   a storage has a new state
//   recomputeFrom Empty            Recomputable            the value's op has a recipe
//   keep          all but Away     Held, Both              the bytes must stay
//   putAway       all but Away     Away                    a store has taken the bytes
//   restore       all              Held                    a replay, a stash or a copy gives bytes
//   holdAlone     Held, Both       same                    the storage is about to be written
//                 Recomputable     Both                    see Note [Made each time]
//   release       all but Away     Empty,    Recomputable  nothing needs the bytes
//   giveUp        Held, Both       Empty,    Recomputable  backward is done with the value
//   dropRecipe    all              Held, Empty,    Away,   no write can reach the bytes
//                                  or same if due
//   overwritten   all              same                    the storage gets a later state,
//   showInstead   all              same                    and handles show that state
//
// The data of a value, for reading. Value has the methods that change it.
class EBB_API ValueData : public c10::intrusive_ptr_target, public InArena {
 public:
  ~ValueData() override;
  void release_resources() override;

  const Home& home() const { return home_; }
  const ValueDecision& decision() const { return decision_; }
  const Versions& versions() const { return versions_; }
  const StateFacts& facts() const { return facts_; }
  const Uses& uses() const { return uses_; }
  ValueState state() const {
    return stash()                    ? ValueState::Away
           : home_.bytes() && recipe_ ? ValueState::Both
           : home_.bytes()            ? ValueState::Held
           : recipe_                  ? ValueState::Recomputable
                                      : ValueState::Empty;
  }

  // How to recompute the value; null for a leaf.
  const c10::intrusive_ptr<Recipe>& recipe() const { return recipe_; }
  // The stash, or null. See Note [Stored values].
  const c10::intrusive_ptr<Stash>& stash() const { return rare().stash; }
  // The storage that handles show in place of the value's bytes; nearly always null. See Note
  // [Silent writes].
  const c10::Storage& redefined() const { return rare().redefined; }

  // The data that a plug-in has attached to the value; null if there is none.
  template <class Part>
  Part* extra() const {
    return rare().extras.get<Part>();
  }
  // True if a plug-in needs the value until its region ends.
  bool waitsForEnd() const { return rare_ && rare_->extras.waitForEnd(); }
  // True if a replay or a stash gives back only a part of the bytes.
  bool isPartial() const { return rare_ && rare_->extras.isPartial(); }

  // A storage that has this value's bytes now: one that ebb holds, or one that other code keeps
  // alive and has not written. Null if there is neither, so at most a recipe or a stash is left.
  // Null for a compared value with a recipe, even if its storage lives.
  c10::Storage available() const;

  // True if only the value and its handles hold the kept bytes. Then no other code can write to the
  // bytes, and the value needs no recipe. False if other code resized the storage before.
  bool ownsItsBytes() const;

 protected:
  ValueData();
  const RareParts& rare() const { return rare_ ? *rare_ : kNone; }

  // In this order, small members fill the padding of larger ones.
  [[no_unique_address]] Home home_;
  ValueDecision decision_;
  StreamsOfBytes streams_;
  std::unique_ptr<RareParts> rare_;  // null until one of them has been set
  [[no_unique_address]] Versions versions_;
  StateFacts facts_;
  Uses uses_;
  c10::intrusive_ptr<Recipe> recipe_;

 private:
  static const RareParts kNone;
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
// A restored value stays Held until nothing refers to it, so each op is replayed at most once.
// Note [Made each time] has the exceptions.
//
// The parts of a value are members and not pointers, so ebb allocates one block of memory for each
// value. Rare parts are in another block.
//
// A value: one state of one storage. See Note [Transitions of a value].
struct EBB_API Value final : ValueData {
  // The state that the storage of `tensor` has now. `before`: the writers of the storage's last
  // state; null: there is none.
  explicit Value(
      const at::Tensor& tensor, StateFacts facts = {}, ValueDecision decision = {},
      const Versions* before = nullptr);

  // The policy or a plug-in decides what happens to the bytes.
  void decide(ValueDecision decision) { decision_ = decision; }

  // From now on `recipe` recomputes the value.
  void recomputeFrom(c10::intrusive_ptr<Recipe> recipe);
  // Drops the recipe unless a store has yet to take the bytes: the store may be full. `onlyOurs`:
  // no other code can write to the bytes from now on.
  void dropRecipe(bool onlyOurs = false);

  // Holds the bytes, in `storage`, to which other code can write. Drops the recipe unless the
  // policy saves the value. `due`: a store has yet to take the bytes. `handlesRely`: see
  // Uses::relyOnBytes().
  void keep(const c10::Storage& storage, bool due, bool handlesRely = false);
  // Holds bytes that only ebb can write to. Keeps the recipe. `changed`: an unseen write came
  // before the copy.
  void holdAlone(c10::Storage bytes, bool changed = false);
  // Takes the bytes, recomputed, copied or back from a stash. `onlyOurs`: no other code can write
  // to them.
  void restore(c10::Storage made, bool onlyOurs);
  // From now on `away` stands for the bytes.
  void putAway(c10::intrusive_ptr<Stash> away);
  // Gives up the bytes, and returns them.
  c10::Storage release();
  // Releases the bytes, and keeps a weak reference to their storage as Home::storage().
  void giveUp();

  // The storage gets a later state. A stash becomes independent of the storage.
  void overwritten();
  // From now on handles show `now`. `isLater`: the storage has a later state, or may have, and
  // eager's saved tensors show that state too.
  void showInstead(const c10::Storage& now, bool isLater = true);

  // True if `tensor` shows the storage in this state. Notes the tensor's counter. See Note [Version
  // stamps].
  bool isShownBy(const at::Tensor& tensor);
  // Sets the fingerprint that shows unseen writes: see Note [Fingerprints of leaves].
  void watch(uint64_t fingerprint);

  // Drops the weak reference to the storage.
  void loseStorage();
  // If the storage is gone, returns true, and releases what torch keeps allocated for the weak
  // reference and for the version counter. Does nothing for a compared value.
  bool releaseGone();

  // Attaches data of a plug-in. `isCompared`: see StateFacts::compared.
  template <class Part>
  void attach(c10::intrusive_ptr<Part> extra, bool isCompared = false) {
    allocateRare().extras.set(std::move(extra));
    facts_.compared |= isCompared;
  }

  using ValueData::uses;
  using ValueData::versions;
  Uses& uses() { return uses_; }
  Versions& versions() { return versions_; }

 private:
  friend class GraphStreams;  // writes its notes, `streams_`
  friend struct LatestState;  // is noted in the rare parts
  RareParts& allocateRare();
};

// A strong reference to a value, which the value counts apart from all others.
template <void (Uses::*kGain)(), void (Uses::*kLose)()>
class CountedRef {
 public:
  CountedRef() = default;
  explicit CountedRef(c10::intrusive_ptr<Value> value) : value_(std::move(value)) {
    if (value_) {
      (value_->uses().*kGain)();
    }
  }
  CountedRef(const CountedRef& other) : CountedRef(other.value_) {}
  CountedRef(CountedRef&& other) noexcept : value_(std::move(other.value_)) {}
  CountedRef& operator=(CountedRef other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~CountedRef() { take(); }

  // Returns an ordinary reference, which the value does not count.
  c10::intrusive_ptr<Value> take() {
    if (value_) {
      (value_->uses().*kLose)();
    }
    return std::move(value_);
  }

  const c10::intrusive_ptr<Value>& pointer() const { return value_; }
  Value* get() const { return value_.get(); }
  Value& operator*() const { return *value_; }
  Value* operator->() const { return value_.get(); }
  explicit operator bool() const { return value_.defined(); }

 private:
  c10::intrusive_ptr<Value> value_;
};
using HandleOn =
    CountedRef<&Uses::gainHandle, &Uses::loseHandle>;  // a handle's reference to its value
using ReaderOf = CountedRef<&Uses::gainReader, &Uses::loseReader>;  // a recipe's, to an input

// Note [Handles that follow]
// Tensors with version counters of their own may share a storage, such as the results of
// unsafe_chunk, which GRUCell and LSTMCell write in place. In eager, a tensor that was saved
// through one of them shows a later write through another: no version check fails. So all handles
// on the states of such a storage hold one LatestState in place of a value. When a write leaves a
// state that a replay can make, they show that state, and the storage can be freed. Values refer to
// LatestState weakly, because the recipe of a later state reads the earlier one: a strong reference
// would be a cycle.
struct LatestState {
  HandleOn value;  // counts as one handle; the graph's lock guards it

  // Autograd has just packed `value`. Returns what the new handle must share with the others on
  // this storage. Null if the handle follows no writes: it then refers to `value` itself.
  static std::shared_ptr<LatestState> of(Value& value);
  // Handles that follow show `after`, the state after `before`, from now on. False if there are
  // none, or if no replay makes `after`.
  static bool handOn(const Value& before, const c10::intrusive_ptr<Value>& after);
};

// True if only handles refer to `value`: no recipe, and no open region.
bool onlyHandlesOwn(const c10::intrusive_ptr<Value>& value);

// True if the fingerprint shows that the leaf's `storage` has changed since the fingerprint was
// taken.
bool hasChanged(const Value& value, const c10::Storage& storage, FingerprintOf what);

}  // namespace ebb
