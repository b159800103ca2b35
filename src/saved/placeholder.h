// Tensors whose memory is freed and restored before backward needs it.
#pragma once

#include <optional>

#include "ebb/export.h"
#include "saved/saved_tensor.h"

namespace ebb {

// Note [Placeholders]
// A tensor that a region recomputes may leave the region. Functions outside of regions may save it,
// and then hold its storage. If the tensor was marked inside the region, its storage can be emptied
// after those functions have run. The storage is refilled, by sharing the recomputed memory, when
// backward approaches the functions. Meanwhile a read raises an error that names the op, the region
// and the fix. The idea comes from Megatron-LM's CheckpointWithoutOutput.
class EBB_API Placeholder {
 public:
  // An open region of this thread must have computed `tensor` and must recompute it. Throws
  // c10::ValueError otherwise.
  explicit Placeholder(const at::Tensor& tensor);
  ~Placeholder();
  Placeholder(const Placeholder&) = delete;
  Placeholder& operator=(const Placeholder&) = delete;

  // Empties the storage of `tensor`, the marked tensor or an alias. Throws c10::ValueError if the
  // storage was written after the mark, or is not resizable.
  void discard(const at::Tensor& tensor);

  // Recomputes the tensor and shares its memory with `alias`, an alias of the discarded tensor. A
  // second call does nothing.
  void refill(const at::Tensor& alias);

 private:
  std::optional<SavedTensor> saved_;  // how to recompute the tensor; empty after refill()
  c10::VariableVersion counter_;      // of the marked tensor
  uint32_t version_ = 0;              // of counter_ at the mark
  c10::Storage storage_;              // set by discard(); compared with `alias`, and stays empty
  bool empty_ = false;                // between discard() and refill()
};

}  // namespace ebb
