// What is kept of one tensor that autograd packed.
#pragma once

#include <c10/core/SafePyObject.h>

#include <memory>
#include <string>
#include <vector>

#include "graph/geometry.h"
#include "record/recorder.h"

namespace ebb {

// Its members are many, since there is one for each tensor that autograd saves: it is one block of
// memory.
class SavedTensor {
 public:
  SavedTensor() = default;
  SavedTensor(const SavedTensor& other);
  SavedTensor(SavedTensor&& other) noexcept = default;
  SavedTensor& operator=(SavedTensor&& other) noexcept = default;
  ~SavedTensor();

  // Keeps what is needed of `tensor`, which may be a part of a wrapper. Called once.
  void pack(Recorder& recorder, const at::Tensor& tensor, bool part = false);

  // The tensor with its old bytes, unknown to autograd. See Note [One tensor for all unpacks].
  at::Tensor unpack();

  // Other streams may use `unpacked`, which unpack() gave, without asking.
  void shareWithAllStreams(const at::Tensor& unpacked);

  // "the output of aten::mul.Tensor saved in region 'block'", for messages.
  std::string origin() const;

  // Type and sizes, as eager's messages have them.
  std::string description() const;

  // Whether unpack makes its bytes again, or those of a part.
  bool isRecomputed() const;

  // Whether its bytes, or a part of them, are away or about to be sent.
  bool isOffloaded() const;

  // Whether unpack gives a tensor with a version counter of its own, not the packed one's.
  bool isRebuilt() const {
    return !kept_.defined();
  }

  // Whether the region in which it was packed is still open on this thread.
  bool isOfOpenRegion() const;

 private:
  struct Parts;  // of a wrapper subclass

  at::Tensor rebuild();
  void noteAsked() const;
  void dropFromOutside();
  bool packParts(Recorder& recorder, const at::Tensor& tensor);
  c10::Storage materialised() const;
  c10::Storage verified(const c10::Storage& replayed) const;
  bool isReadByRecipes(const c10::Storage& storage) const;
  at::Tensor unpackKept() const;
  void giveUp();

  c10::intrusive_ptr<Graph> graph_;  // the lock, and names for messages
  c10::intrusive_ptr<Value> value_;  // null for leaves and what the recorder does not know
  c10::Storage storage_;             // kept bytes of a computed tensor
  at::Tensor kept_;                  // a kept tensor: leaves, and what cannot be rebuilt
  std::shared_ptr<Parts> parts_;     // null unless it is put together from inner tensors
  Geometry geometry_;                // of value_ and storage_; of the whole, if there are parts
  at::Tensor unpacked_;              // what unpack gave, if the tensor needs no grad
  bool recompute_ = false;           // value_ is to be materialised; else its bytes are kept
  bool requiresGrad_ = false;        // of the packed tensor
  bool givenUp_ = false;             // see Note [Given up when unpacked]
  bool fromOutside_ = false;         // see Note [What only ebb holds]
  uint16_t region_ = 0;              // index in Graph::names
  const char* producer_ = nullptr;   // the op that made it, for messages
  EntryPtr entry_;                   // null but while reports are recorded
};

}  // namespace ebb
