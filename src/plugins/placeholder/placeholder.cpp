#include "plugins/placeholder/placeholder.h"

#include <c10/util/StringUtil.h>

#include <utility>

#include "record/recorder.h"
#include "stores/share_storage.h"

namespace ebb {

Placeholder::Placeholder(const at::Tensor& tensor) {
  Recorder* recorder = openRecorder();
  TORCH_CHECK_VALUE(
      recorder != nullptr,
      "ebb: a tensor can be marked as discardable only inside the region that computes it");
  saved_.emplace();
  saved_->pack(*recorder, tensor);
  TORCH_CHECK_VALUE(
      saved_->isRecomputed() && !saved_->isOffloaded(), "ebb: ", saved_->origin(),
      " cannot be discarded: it is an input of the region, or its operator has the decision SAVE "
      "or OFFLOAD. Give the operator the decision RECOMPUTE.");
  mark_.counter = tensor.unsafeGetTensorImpl()->version_counter();
  mark_.version = versionOf(tensor);
}

void Placeholder::discard(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      mark_.holds(), "ebb: ", saved_->origin(),
      " was written after discardable() marked it, so it cannot be recomputed. Mark it after the "
      "write, inside the region.");
  c10::Storage storage = tensor.storage();
  TORCH_CHECK_VALUE(
      storage.resizable(), "ebb: ", saved_->origin(),
      " cannot be discarded: its memory belongs to other code (numpy, from_blob) or to several "
      "storages. Mark a clone instead.");
  emptyStorage(
      storage,
      c10::str(
          "ebb: ", saved_->origin(), " (", saved_->description(),
          ") was read after discard() freed it and before backward reached restore_at. Read it "
          "before discard(), or pass a restore_at that backward reaches earlier."));
  storage_ = std::move(storage);
}

void Placeholder::refill() {
  if (!storage_) {
    return;
  }
  const at::Tensor tensor = saved_->unpack();
  saved_->shareWithAllStreams(tensor);
  fillStorage(storage_, tensor.storage());
  storage_ = c10::Storage();
  saved_.reset();  // the last tensor on the memory frees the memory
}

}  // namespace ebb
