// Tensors whose memory is freed, and restored in time for backward.
#pragma once

#include <optional>

#include "ebb/export.h"
#include "saved/saved_tensor.h"

namespace ebb {

// Note [Placeholders]
// A recomputable tensor may leave its region. Functions outside of regions may save the tensor, and
// then hold the storage. If the tensor was marked inside the region, ebb can empty the storage
// after the functions have run. ebb refills the storage, by sharing the recomputed memory, before
// backward runs these functions. Meanwhile a read raises an error that names the op, the region and
// the fix. The idea comes from Megatron-LM's CheckpointWithoutOutput.
class EBB_API Placeholder {
 public:
  // An open region of this thread must have computed `tensor`, and must have decided to recompute
  // it, not to save or offload it. Throws c10::ValueError otherwise.
  explicit Placeholder(const at::Tensor& tensor);
  Placeholder(const Placeholder&) = delete;
  Placeholder& operator=(const Placeholder&) = delete;

  // Empties the storage of `tensor`, the marked tensor or an alias. Throws c10::ValueError if the
  // storage was written after the mark, or is not resizable.
  void discard(const at::Tensor& tensor);

  // Recomputes the tensor and shares its memory with the discarded tensor. A second call does
  // nothing.
  void refill();

 private:
  std::optional<SavedTensor> saved_;  // how to recompute the tensor; empty after refill()
  VersionStamp mark_;                 // of the marked tensor, at the mark
  c10::Storage storage_;              // emptied by discard(); null before and after
};

}  // namespace ebb
