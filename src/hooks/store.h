// The interface of a plug-in that takes the bytes of kept values out of the device's memory.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include "ebb/export.h"
#include "ebb/policy.h"

namespace ebb {

struct Context;
struct Value;

// Stands for a value's bytes while they are elsewhere: in host memory, on disk or in a page pool.
class EBB_API Stash : public c10::intrusive_ptr_target {
 public:
  // Brings the bytes back to the device, for the current stream. `living` is the original storage,
  // if other code still refers to the storage: then nothing is copied.
  virtual c10::Storage fetch(const c10::Storage& living) = 0;

  // Like fetch(), but on another thread, before backward needs the bytes. Returns null if only
  // backward may fetch the bytes.
  virtual c10::Storage fetchAhead(const c10::Storage& living) = 0;

  // True if, after fetchAhead(), BackwardEvents::arrives() must get the stash.
  virtual bool awaitsBackward() const { return false; }

  // Called before a write to the original storage on the current stream.
  virtual void beforeWrite() = 0;
};
using StashPtr = c10::intrusive_ptr<Stash>;

// The store of one decision, such as OFFLOAD, for the whole process. The core calls the methods
// under the graph's lock, on the region's thread.
class EBB_API Store {
 public:
  // True if the store takes values like this one, which `tensor` shows.
  virtual bool accepts(const Value& value, const at::Tensor& tensor) = 0;
  // False if the store cannot take the value yet.
  virtual bool isReady(const Value& value) const { return true; }
  // True if the store also takes results that cannot be recomputed.
  virtual bool takesWithoutRecipe() const { return false; }
  // False if the store can no longer take the value, because recipes have read the value.
  virtual bool mayBeChosen(const Value& value) const { return true; }

  // Takes the value's bytes, in `storage`. Returns null if the store has no room: then the value is
  // recomputed, or its bytes stay.
  virtual StashPtr put(const Context& context, Value& value, const c10::Storage& storage) = 0;
  // For reports: why put() has returned null.
  virtual const char* whyFull() const = 0;
  // The value's bytes stay, although the policy has chosen the store.
  virtual void staysInstead(const Context& context, Value& value) {}
  // An outermost region ends that has put values into the store. Must not throw.
  virtual void regionEnds() {}

 protected:
  ~Store() = default;
};

// Registers the store of a decision. Returns true, so that a plug-in can call it when the library
// is loaded.
EBB_API bool registerStore(Decision decision, Store& store);

// The store of a decision; null for SAVE and the decisions that recompute. Throws c10::ValueError
// if the decision's plug-in is not built.
EBB_API Store* storeOf(Decision decision);

}  // namespace ebb
