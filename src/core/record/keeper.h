// Keeps the bytes of values: in memory, or in the store that the policy has chosen.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

#include "graph/value.h"
#include "hooks/store.h"
#include "record/context.h"

namespace ebb {

// True if an autograd function outside of the region has computed `tensor`, an input of the region.
// False for parameters and their views.
bool isActivation(const at::Tensor& tensor);

// See Note [Stored values]
class Keeper {
 public:
  explicit Keeper(const Context& context) : context_(context) {}

  // From now on the value, shown by `tensor`, holds its bytes. `handlesRely`: see
  // Uses::relyOnBytes().
  void keep(Value& value, const at::Tensor& tensor, bool handlesRely = false);

  // Records a fingerprint of the bytes of a leaf: see Note [Fingerprints of leaves].
  void takeFingerprint(Value& value);

  // Records a fingerprint of a computed value that the program may still hold.
  void watchEscaped(Value& value);

  // Autograd is about to pack `tensor`, which shows the value. Puts the bytes into the store that
  // the policy has chosen, if the store takes them now.
  void packs(Value& value, const at::Tensor& tensor);

  // True if the policy has chosen a store for `tensor`, an input of the region.
  bool storesInput(const at::Tensor& tensor) const;

  // Puts those of `values` that a handle or a recipe needs into their stores, and releases the
  // others. `values` lists consumers before inputs, since releasing a consumer may make its inputs
  // unneeded.
  void putNeeded(std::vector<c10::intrusive_ptr<Value>> values);

  // Remembers the current stream of `device`: see Note [What is done later].
  void noteStream(c10::Device device);
  // The current stream waits for all remembered streams.
  void joinStreams();

  // Bytes kept since the last call of forgetBytes().
  size_t keptBytes() const { return keptBytes_; }
  void forgetBytes() { keptBytes_ = 0; }

  // The outermost region ends.
  void clear();

 private:
  // Puts the value's bytes, in `storage`, into their store. If the store has no room, keeps the
  // bytes, or drops recomputable bytes.
  void put(Value& value, const c10::Storage& storage);

  const Context& context_;
  c10::SmallVector<c10::Stream, 2> streams_;  // see Note [What is done later]
  c10::SmallVector<Store*, 2> used_;          // stores that hold values of this region
  size_t keptBytes_ = 0;
};

}  // namespace ebb
