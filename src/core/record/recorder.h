// The interceptor of a region: runs each op and records how to recompute its results.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/value.h"
#include "hooks/decider.h"
#include "intercept/interceptor.h"
#include "record/context.h"
#include "record/keeper.h"
#include "record/results.h"
#include "record/value_map.h"

namespace ebb {

// The part of a packed tensor that a handle keeps.
struct Packed {
  const char* producer = nullptr;  // the op that made the tensor, for messages; null for a leaf
  ExtraPtr note;                   // of an observer; nearly always null
  std::shared_ptr<LatestState> latest;  // nearly always null; see Note [Handles that follow]
  bool recompute = false;               // materialise `value`; else its bytes are kept
  uint32_t node = 0;                    // number of the backward node; see Note [Saved by one node]
  HandleOn value;  // null if `latest` is set, or if the handle keeps the tensor as eager does

  // The value that the handle shows now. Null if the handle keeps the tensor as eager does.
  const HandleOn& shown() const { return latest ? latest->value : value; }
};

class Recorder final : public Interceptor {
 public:
  void call(Call& call) override;
  void aliased(const at::Tensor& tensor, const at::Tensor& result) override;

  // The user has named the value of `tensor`: the policy may decide again.
  void name(const at::Tensor& tensor, const std::string& name);

  // Called when autograd packs `tensor`, or a wrapper with `tensor` as a part. Decides between
  // keeping and recomputing its bytes.
  Packed pack(const at::Tensor& tensor, bool part);

  // Begins a write unseen by torch: see Note [Opaque writes].
  void opaqueWriteBegins(const at::Tensor& tensor);
  // Ends a write begun by opaqueWriteBegins().
  void opaqueWriteEnds(const at::Tensor& tensor);

  // The program is about to empty `storage`. Returns true if an op of the region has read it, and
  // none has computed its contents: then the program restores the contents before backward.
  bool storageEmptied(c10::StorageImpl* storage);

  // A collective outside the dispatcher is about to write to `tensor`.
  void collectiveWrites(const at::Tensor& tensor);

  // Begins an outermost region. A recorder serves one region after the other.
  void open(c10::intrusive_ptr<Graph> graph);

  // Sets the settings of the innermost region. Called whenever another region becomes the
  // innermost. `notes`: of the outermost region. All references must live until the next call, or
  // until close() has returned.
  void workFor(
      Decider& decider, RegionCounters& counters, uint16_t region, uint32_t nested,
      bool trustCustomOps, RegionNotes& notes);

  // Ends the outermost region, or only a part: see Note [Parts of a region]. Called when
  // autograd has counted all writes.
  void close(bool onlyPart = false);

  const Context& context() const { return context_; }
  // The known values of the open region. The graph's lock guards them.
  ValueMap& values() { return values_; }

 private:
  void callInplaceView(Call& call);
  void prepareForAfterRegion(const c10::intrusive_ptr<Value>& entry);
  // Called before a write to `tensor`. The caller does not hold the graph's lock.
  void beforeWrite(const at::Tensor& tensor);
  // Adds `value`, unless the program empties its storage and restores the contents before backward.
  void addNeed(EarlierNeeds& needs, const c10::intrusive_ptr<Value>& value);

  Context context_{.results = &results_};
  Keeper keeper_{context_};
  ValueMap values_{context_, keeper_};
  Results results_;
  EarlierNeeds needed_;        // of earlier regions
  EarlierNeeds earlierParts_;  // of the open region: see Note [Writes in a later part]
  c10::SmallVector<const c10::StorageImpl*, 1> emptied_;  // leaves whose emptying ends the part
};

// This thread's recorder if the thread is inside a region; else null.
Recorder* openRecorder();

}  // namespace ebb
