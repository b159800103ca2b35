// What autograd holds in place of a saved tensor.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <string>

#include "ebb/export.h"
#include "graph/geometry.h"
#include "graph/recorder.h"

namespace ebb {

class EBB_API Handle final : public torch::autograd::SavedVariableHooks {
 public:
  explicit Handle(Recorder& recorder);
  // Another handle on the same saved tensor; unpacks to the same.
  Handle(const Handle& other);
  ~Handle() override;

  void call_pack_hook(const at::Tensor& tensor) override;
  at::Tensor call_unpack_hook() override;
  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data()
      const override;

  // The tensor that was packed. Also called by compiled autograd, through the bindings.
  at::Tensor unpack() const;

 private:
  void checkVersion() const;
  at::Tensor unpackKept() const;
  c10::Storage materialised() const;
  bool isReadByRecipes() const;
  std::string origin() const;

  Recorder* recorder_;               // only valid until packed
  c10::intrusive_ptr<Graph> graph_;  // the lock, and names for messages
  c10::intrusive_ptr<Value> value_;  // null for leaves and what the recorder does not know
  bool recompute_ = false;           // value_ is to be materialised; else its bytes are kept
  c10::Storage storage_;             // kept bytes of a computed tensor
  at::Tensor kept_;                  // a kept tensor: leaves, and what cannot be rebuilt
  Geometry geometry_;                // of value_ and storage_
  c10::VariableVersion counter_;     // outlives the tensor; see Note [Version checks]
  uint32_t version_ = 0;             // what counter_ showed when packed
  uint16_t region_ = 0;              // index in Graph::names
  const char* producer_ = nullptr;   // the op that made it, for messages
};

}  // namespace ebb
