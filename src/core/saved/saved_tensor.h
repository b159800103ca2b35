// ebb's state for one tensor packed by autograd.
#pragma once

#include <c10/core/SafePyObject.h>

#include <memory>
#include <string>
#include <vector>

#include "graph/geometry.h"
#include "record/recorder.h"

namespace ebb {

class ReplayLock;

// A tensor packed by autograd, until the handle dies.
class SavedTensor {
 public:
  // Stores what unpack() needs. `part`: `tensor` is an inner tensor of a wrapper. Called once.
  void pack(Recorder& recorder, const at::Tensor& tensor, bool part = false);

  // The tensor with the packed bytes, unknown to autograd. See Note [One tensor for all unpacks].
  at::Tensor unpack();

  // Lets other streams use `unpacked`, a result of unpack(), without waiting.
  void shareWithAllStreams(const at::Tensor& unpacked);

  // "the output of aten::mul.Tensor saved in region 'block'", for messages.
  std::string origin() const;

  // Type and sizes, in the format of eager's messages.
  std::string description() const;

  // True if unpack recomputes the bytes of the tensor or of a part.
  bool isRecomputed() const;

  // True if the bytes are away.
  bool isOffloaded() const;

  // True if unpack gives a tensor with another version counter than the packed tensor's.
  bool isRebuilt() const { return !kept_.defined(); }

  // True if the region that packed the tensor is still open on this thread.
  bool isOfOpenRegion() const;

 private:
  struct Parts;  // of a wrapper subclass

  at::Tensor rebuild(const ReplayLock& locked);
  bool packParts(Recorder& recorder, const at::Tensor& tensor);
  // The storage that a node of backward gets: the program's own if it still exists.
  c10::Storage bytesForBackward(const ReplayLock& locked) const;
  // Backward may write to `storage`, so the recipes that read the value run now, or get a copy.
  void giveRecipesTheirOwn(const ReplayLock& locked, const c10::Storage& storage) const;
  // Throws if the value's bytes, which no storage holds, cannot be recomputed or reloaded.
  void checkCanComeBack() const;
  at::Tensor unpackKept() const;
  void giveUp();

  c10::intrusive_ptr<Graph> graph_;  // the lock, and names for messages
  bool requiresGrad_ = false;        // of the packed tensor
  bool givenUp_ = false;             // see Note [Given up when unpacked]
  uint16_t region_ = 0;              // index in Graph::names
  c10::Storage storage_;             // kept bytes of a computed tensor
  at::Tensor kept_;                  // a whole tensor: a leaf, or an unrecordable tensor
  std::shared_ptr<Parts> parts_;     // inner tensors of a wrapper; else null
  Geometry geometry_;    // of packed_.shown() and storage_; of the wrapper, if there are parts
  at::Tensor unpacked_;  // result of unpack, if the tensor needs no grad
  // The last member: a handle that holds a storage counts last and loses its count first, so the
  // value never takes a reference of the program for a handle's. See ValueData::ownsItsBytes().
  Packed packed_;
};

}  // namespace ebb
