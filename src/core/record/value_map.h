// Maps each storage to its current state: the values known in the open region.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/flat_hash_map.h>
#include <c10/util/intrusive_ptr.h>

#include <utility>
#include <vector>

#include "graph/geometry.h"
#include "graph/value.h"
#include "record/context.h"
#include "record/sweep_window.h"

namespace ebb {

class Keeper;

// A written value whose version torch may still move: see Note [Version stamps].
struct Unsettled {
  c10::intrusive_ptr<Value> after;   // the new state; its version may yet move by one
  c10::intrusive_ptr<Value> before;  // the old state, if autograd had packed it
  c10::Storage storage;              // of both states; set only if `before` is
  c10::VariableVersion viewed;       // counter moved by an in-place view; else empty
  bool counted;                      // torch moves the version by one before applyDeferred()
  // the op, if the version moved first: see Note [Versions that move first]
  const OpTraits* movedFirst = nullptr;
};

// A write to a storage that no operator call shows.
enum class UnseenWrite : uint8_t {
  OpaqueBegins,  // see Note [Opaque writes]
  OpaqueEnds,
  Collective,  // see Note [Communication]
  Undeclared,  // see Note [Unsaid writes]
};

// See Note [Ownership]
class ValueMap {
 public:
  // The table lives as long as the thread, because regions come again and again.
  using Map = ska::flat_hash_map<c10::StorageImpl*, c10::intrusive_ptr<Value>>;

  ValueMap(const Context& context, Keeper& keeper) : context_(context), keeper_(keeper) {}

  // Keeps or stores the bytes of the values.
  Keeper& keeper() const { return keeper_; }

  // The known value of `tensor`'s storage, or null. An unseen write may have changed the storage
  // after ebb recorded the value.
  c10::intrusive_ptr<Value>* find(const at::Tensor& tensor) {
    const auto found = values_.find(storageOf(tensor));
    return found == values_.end() ? nullptr : &found->second;
  }

  // The current state of `tensor`'s storage; a new leaf if the state is unknown. `slot`: its map
  // entry.
  c10::intrusive_ptr<Value>& current(const at::Tensor& tensor);
  c10::intrusive_ptr<Value>& current(c10::intrusive_ptr<Value>& slot, const at::Tensor& tensor);

  // An op has made `value`.
  void put(c10::StorageImpl* storage, c10::intrusive_ptr<Value> value) {
    made_.add(storage, value.get());
    values_[storage] = std::move(value);
  }

  // From now on the state of this storage is unknown.
  void forget(c10::StorageImpl* storage) { values_.erase(storage); }

  // The storage of `value` is about to be written: see Note [Copy on write]. `indifferent`: number
  // of recipe inputs that refer to `value` and do not need its old contents.
  void prepareForWrite(const c10::intrusive_ptr<Value>& value, size_t indifferent);

  // Code that torch does not see writes to `tensor`, whose new state is a leaf.
  void replaceByLeaf(const at::Tensor& tensor, UnseenWrite write);

  // The storage of `value` has got other memory.
  void storageGrew(const c10::intrusive_ptr<Value>& value, const c10::Storage& storage);

  // Adds a write to be settled at the next op, pack or exit: see Note [Version stamps].
  void deferVersionCheck(Unsettled written) { unsettled_.push_back(std::move(written)); }
  // Settles all added writes.
  ValueMap& applyDeferred();

  // True if it is time to sweep: see Note [When dead values are looked for].
  bool needsSweep() const;
  // Forgets dead values and, if the map is full, stores values that are due. The caller must hold
  // no recipe, because sweep() counts references to find dead values.
  void sweep();

  // Values that a store has yet to take; latest first.
  std::vector<c10::intrusive_ptr<Value>> due() const;

  const Map& all() const { return values_; }

  void clear();

 private:
  // A new leaf in the storage of `tensor`. `before`: its known state, no longer valid, or null.
  c10::intrusive_ptr<Value> leafOf(
      const at::Tensor& tensor, const c10::intrusive_ptr<Value>& before);
  size_t forget(size_t window, bool (*isDead)(const c10::intrusive_ptr<Value>&));
  std::vector<c10::intrusive_ptr<Value>> dueAndNeeded(size_t window) const;

  const Context& context_;
  Keeper& keeper_;
  Map values_;
  SweepWindow made_;                  // values of the map, and some that have left it
  std::vector<Unsettled> unsettled_;  // see Note [Version stamps]
};

// Gives a leaf of `graph` a copy of its bytes, because other code may write to the original.
void makePrivate(Graph& graph, Value& value, RegionCounters& counters);

// The storage of a recomputable value with other holders; else null.
c10::Storage escapedStorage(const Value& value);

// Moves the version of a tensor written unseen, if a value knows the storage: a graph may need the
// old contents.
void moveVersionIfNeeded(const at::Tensor& tensor);

// Calls moveVersionIfNeeded() for a tensor written by a collective, if the tensor has a grad_fn:
// torch does not move the version.
void moveVersionOfComputed(const at::Tensor& tensor);

}  // namespace ebb
