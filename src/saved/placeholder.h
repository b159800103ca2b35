// Tensors whose memory is given up and comes back before backward needs it.
#pragma once

#include <optional>

#include "ebb/export.h"
#include "saved/saved_tensor.h"

namespace ebb {

// Note [Placeholders]
// A tensor that a region recomputes may leave it and be saved by functions outside of regions,
// which hold its storage. Marked inside the region, its storage can be emptied when those functions
// have run, and filled again, by sharing the recomputed memory, when backward comes near them.
// Whoever reads it meanwhile gets an error that names the op, the region and the fix. The idea is
// that of Megatron-LM's CheckpointWithoutOutput.
class EBB_API Placeholder {
 public:
  // `tensor` is computed by an open region of this thread, which recomputes it. Throws
  // c10::ValueError otherwise.
  explicit Placeholder(const at::Tensor& tensor);
  ~Placeholder();
  Placeholder(const Placeholder&) = delete;
  Placeholder& operator=(const Placeholder&) = delete;

  // Empties the storage that `tensor`, the one that was marked or an alias, is on. Throws
  // c10::ValueError if it was written since it was marked, or is not resizable.
  void discard(const at::Tensor& tensor);

  // Recomputes the tensor and shares its memory with `alias`, an alias of what was discarded. Does
  // nothing if that has been done.
  void refill(const at::Tensor& alias);

 private:
  std::optional<SavedTensor> saved_;  // how to make it again; dropped when that is done
  c10::VariableVersion counter_;      // of the tensor that was marked
  uint32_t version_ = 0;              // what it showed then
  c10::Storage storage_;              // null before discard(); compared, and kept empty
  bool empty_ = false;                // between discard() and refill()
};

}  // namespace ebb
