// The object that autograd holds in place of a saved tensor.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "ebb/export.h"
#include "saved/saved_tensor.h"

namespace ebb {

class EBB_API Handle final : public torch::autograd::SavedVariableHooks, public InArena {
 public:
  Handle();
  // Another handle on the same saved tensor; unpacks to the same tensor.
  Handle(const Handle& other);
  ~Handle() override;

  // Called once, on the thread and in the region that made the handle.
  void call_pack_hook(const at::Tensor& tensor) override;
  // The packed tensor. Compiled autograd calls this too, through the bindings.
  at::Tensor call_unpack_hook() override;
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data()
      const override;

 private:
  void checkVersion() const;
  void checkTracer() const;

  SavedTensor saved_;    // the tensor, or how to recompute it
  VersionStamp packed_;  // the tensor's counter when packed; see Note [Version checks]
};

}  // namespace ebb
