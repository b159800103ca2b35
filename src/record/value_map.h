// Which state each storage is in: the values that the open region knows.
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

// A value that a write has made, whose version torch may yet move: see Note [Version stamps].
struct Unsettled {
  c10::intrusive_ptr<Value> after;   // whose stamp may be one short
  c10::intrusive_ptr<Value> before;  // the state it replaced, if autograd had packed that
  c10::Storage storage;              // of both, only if `before` is set
  c10::VariableVersion viewed;       // what an in-place view moved; else empty
  bool counted;                      // its version will have moved by one
  const OpTraits* ahead = nullptr;   // the op, if that was so before: [Versions that move first]
};

// See Note [Ownership]
class ValueMap {
 public:
  // Lives as long as the thread: regions come again and again, so its table is kept.
  using Map = ska::flat_hash_map<c10::StorageImpl*, c10::intrusive_ptr<Value>>;

  ValueMap(const Context& context, Sender& sender) : context_(context), sender_(sender) {
  }

  // What is known of `tensor`'s storage; null: nothing. It may have been written unseen since.
  c10::intrusive_ptr<Value>* find(const at::Tensor& tensor) {
    const auto found = values_.find(storageOf(tensor));
    return found == values_.end() ? nullptr : &found->second;
  }

  // The state that `tensor`'s storage is in now; a new leaf if it is not known. `slot`: its place.
  c10::intrusive_ptr<Value>& current(const at::Tensor& tensor);
  c10::intrusive_ptr<Value>& current(c10::intrusive_ptr<Value>& slot, const at::Tensor& tensor);

  // An op has made `value`.
  void put(c10::StorageImpl* storage, c10::intrusive_ptr<Value> value) {
    made_.add(storage, value.get());
    values_[storage] = std::move(value);
  }

  // Nothing is known of this storage any more.
  void forget(c10::StorageImpl* storage) {
    values_.erase(storage);
  }

  // The storage of `value` is about to be written: see Note [Copy on write]. So many of the
  // recipes' inputs that it is are `indifferent` to the old state.
  void supersede(const c10::intrusive_ptr<Value>& value, size_t indifferent);

  // Something that ebb does not see writes to `tensor`; gives its new state, a leaf.
  Value& replaceByLeaf(const at::Tensor& tensor);

  // The storage of `value` has got other memory.
  void storageGrew(const c10::intrusive_ptr<Value>& value, const c10::Storage& storage);

  // What is to be settled when the next op, pack or exit comes by, and doing so: see Note [Version
  // stamps].
  void owe(Unsettled written) {
    unsettled_.push_back(std::move(written));
  }
  ValueMap& settle();

  // See Note [When dead values are looked for]. No recipe may be on its way into the map.
  bool needsSweep() const;
  void sweep();

  // Values that are to be offloaded and have not been sent, latest first.
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
  MadeValues made_;                   // its entries, and some that were
  std::vector<Unsettled> unsettled_;  // see Note [Version stamps]
};

// Whether only the value and its handles hold its kept bytes: nobody else can write to them any
// more, so no recipe is needed to make them again. Not if somebody resized them before.
bool ownsItsBytes(const Value& value);

// Nobody can write to its bytes any more. Those that are to be sent may yet find no host memory.
void dropRecipe(Value& value);

// Gives a leaf of `graph` a copy of its bytes, which others may write to.
void makePrivate(Graph& graph, Value& value, RegionCounters& counters);

// Whoever else holds the value, which can be made again. Null if nobody does.
c10::Storage escapedStorage(const Value& value);

// Moves the version of a tensor that was written unseen, if more than `ours` values know its
// storage: graphs that may need its old contents.
void moveVersionIfNeeded(const at::Tensor& tensor, size_t ours);

// The same, of one that a collective has written, if autograd knows that it was computed.
void moveVersionOfComputed(const at::Tensor& tensor, size_t ours);

}  // namespace ebb
