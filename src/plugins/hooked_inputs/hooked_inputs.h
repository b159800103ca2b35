// The inputs of a checkpointed call, saved by the program's saved-tensor hooks.
#pragma once

#include <ATen/core/TensorBody.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <vector>

#include "ebb/export.h"
#include "hooks/store.h"

namespace ebb {

// Note [Hooks around a checkpointed call]
// torch's checkpoint saves the tensors that are passed to the call, so saved-tensor hooks around
// the call get these tensors: save_on_cpu and the offloading of frameworks move them to the host. A
// region saves tensors by its own handles, and the hooks would get none. So ebb too lets the hooks
// save the arguments, before the region begins. In the region a stash stands for each argument, so
// only the hooks keep its bytes. When backward reaches the region, ebb unpacks all arguments, each
// once, in the order of the call, as torch's checkpoint does: hooks may rely on this, and free what
// they keep. From then on the region's values have the bytes. If the program still has the tensor,
// they share its memory, and the tensor that the hooks return is dropped.
//
// These arguments are saved and unpacked, but have no stash, so ebb keeps their bytes too:
// parameters, views of a part of a storage, tensors that are not recordable, and a second tensor
// with the same storage.
class EBB_API HookedInputs {
 public:
  // Called outside of regions, with hooks on. Runs the hooks' pack.
  explicit HookedInputs(const std::vector<at::Tensor>& tensors);
  ~HookedInputs();
  HookedInputs(const HookedInputs&) = delete;
  HookedInputs& operator=(const HookedInputs&) = delete;

  // Called in the outermost region of the call, before its first op.
  static void enterRegion(const std::shared_ptr<HookedInputs>& inputs);

  // Runs the hooks' unpack. A second call does nothing. The caller holds the graph's lock, and does
  // not hold the GIL.
  void unpack();

 private:
  struct Input {
    torch::autograd::SavedVariable saved;
    at::Tensor tensor;                     // until the region begins
    c10::weak_intrusive_ptr<Stash> stash;  // gone: the region does not need the bytes
  };
  std::vector<Input> inputs_;  // empty once unpacked
};

}  // namespace ebb
