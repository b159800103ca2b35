// Maps each storage to its current state: the values that the open region knows.
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
#include "record/made_values.h"

namespace ebb {

class Sender;

// A value made by a write whose version torch may still move: see Note [Version stamps].
struct Unsettled {
  c10::intrusive_ptr<Value> after;   // the new state; its stamp may be one short
  c10::intrusive_ptr<Value> before;  // the old state, if autograd had packed it
  c10::Storage storage;              // of both states; set only if `before` is
  c10::VariableVersion viewed;       // counter moved by an in-place view; else empty
  bool counted;                      // the version will have moved by one
  // the op, if the version moved first: see Note [Versions that move first]
  const OpTraits* ahead = nullptr;
};

// See Note [Ownership]
class ValueMap {
 public:
  // The table lives as long as the thread, because regions come again and again.
  using Map = ska::flat_hash_map<c10::StorageImpl*, c10::intrusive_ptr<Value>>;

  ValueMap(const Context& context, Sender& sender) : context_(context), sender_(sender) {
  }

  // The known value of `tensor`'s storage, or null. The storage may have been written unseen since.
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
  void forget(c10::StorageImpl* storage) {
    values_.erase(storage);
  }

  // The storage of `value` is about to be written: see Note [Copy on write]. Among the recipe
  // inputs that refer to `value`, `indifferent` do not need the old state.
  void supersede(const c10::intrusive_ptr<Value>& value, size_t indifferent);

  // A write that ebb does not see changes `tensor`. Returns the new state, a leaf.
  Value& replaceByLeaf(const at::Tensor& tensor);

  // The storage of `value` has got other memory.
  void storageGrew(const c10::intrusive_ptr<Value>& value, const c10::Storage& storage);

  // Adds a write to be settled at the next op, pack or exit: see Note [Version stamps].
  void owe(Unsettled written) {
    unsettled_.push_back(std::move(written));
  }
  // Settles all added writes.
  ValueMap& settle();

  // True if it is time to sweep: see Note [When dead values are looked for].
  bool needsSweep() const;
  // Forgets dead values and sends those due. No recipe may be on its way into the map.
  void sweep();

  // Values to be offloaded that have not been sent, latest first.
  std::vector<c10::intrusive_ptr<Value>> keptToSend() const;

  const Map& all() const {
    return values_;
  }

  void clear();

 private:
  size_t dropUnused(size_t window);
  std::vector<c10::intrusive_ptr<Value>> neededToSend(size_t window) const;

  const Context& context_;
  Sender& sender_;
  Map values_;
  MadeValues made_;                   // live entries and some dead ones
  std::vector<Unsettled> unsettled_;  // see Note [Version stamps]
};

// True if only the value and its handles hold its kept bytes. Then no other code can write to them,
// and the value needs no recipe. False if other code resized the storage before.
bool ownsItsBytes(const Value& value);

// Drops the recipe of a value whose bytes no other code can write. Keeps the recipe of a value that
// is due: it may find no host memory.
void dropRecipe(Value& value);

// Gives a leaf of `graph` a copy of its bytes, because other code may write to them.
void makePrivate(Graph& graph, Value& value, RegionCounters& counters);

// The storage of a recomputable value, if other code holds it too; else null.
c10::Storage escapedStorage(const Value& value);

// Moves the version of a tensor that was written unseen, if more than `ours` values know its
// storage: other graphs may need its old contents.
void moveVersionIfNeeded(const at::Tensor& tensor, size_t ours);

// Calls moveVersionIfNeeded() for a tensor that a collective has written, if autograd knows that it
// was computed.
void moveVersionOfComputed(const at::Tensor& tensor, size_t ours);

}  // namespace ebb
