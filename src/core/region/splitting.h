// Splits a region into parts that backward recomputes apart from each other.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/StorageImpl.h>

#include "intercept/interceptor.h"
#include "record/recorder.h"

namespace ebb {

// Note [Regions that are split]
// Backward recomputes a region as a whole. FSDP frees the parameters of a unit after the unit's
// forward, and gathers them again just before the unit's backward. If a region contained two such
// units, backward would need the parameters of both at once. So if a job of several ranks empties a
// storage that ebb has read in the open region and has not computed there, ebb splits the region
// before the next op or pack, and recomputes the two parts apart from each other. ebb waits for the
// next op or pack because a region with only one unit ends before that. So ebb does not split such
// a region. In a split region, escapes="placeholder" affects only the last part.
//
// The interceptor of a region from the emptying of the storage to the next op.
class Splitter final : public Interceptor {
 public:
  // `recorder` records all parts. `split` ends the thread's part and begins the next one.
  Splitter(Recorder& recorder, void (*split)()) : recorder_(recorder), split_(split) {}

  // The program is about to empty `storage`. Returns true if the region must be split.
  bool storageEmptied(c10::StorageImpl* storage);

  // True if the next op or pack begins another part.
  bool isDue() const { return isDue_; }
  // The part, or the region, ends.
  void partEnds() { isDue_ = false; }

  void call(Call& call) override;
  void aliased(const at::Tensor& tensor, const at::Tensor& result) override;
  Interceptor& recorder() override { return recorder_; }

 private:
  Recorder& recorder_;
  void (*const split_)();
  bool isDue_ = false;
};

}  // namespace ebb
