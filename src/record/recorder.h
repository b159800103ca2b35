// The interceptor of a region: runs each op and writes down how its results were made.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "graph/graph.h"
#include "graph/value.h"
#include "intercept/interceptor.h"
#include "policy/decider.h"
#include "record/context.h"
#include "record/pinned.h"
#include "record/results.h"
#include "record/row_marks.h"
#include "record/sender.h"
#include "record/value_map.h"

namespace ebb {

// What a handle keeps of the tensor that autograd packed.
struct Packed {
  c10::intrusive_ptr<Value> value;  // null: unknown to the recorder, or a leaf; kept as in eager
  bool recompute = false;           // `value` is to be materialised; else its bytes are kept
  const char* producer = nullptr;   // the op that made it, for messages; null for a leaf
  bool fromOutside = false;         // kept, and made by no op of the region; not a parameter
  EntryPtr entry;                   // null but while reports are recorded
};

class Recorder final : public Interceptor {
 public:
  Recorder() {
    context_.results = &results_;
    context_.pinned = &pinned_;
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void call(Call& call) override;
  void aliased(const at::Tensor& tensor, const at::Tensor& result) override;

  // The value that `tensor` shows has been given a name: the policy may decide anew.
  void name(const at::Tensor& tensor, const std::string& name);

  // Of `tensor` only the first rows live: see Note [Rows]. Throws as ebb::markRows.
  void markRows(const at::Tensor& tensor, const at::Tensor& rows);

  // Called when autograd packs `tensor`, or a wrapper of which it is a part: decides whether its
  // bytes are kept or can be made again.
  Packed pack(const at::Tensor& tensor, bool part);

  // Around a write that torch does not see: see Note [Opaque writes].
  void opaqueWriteBegins(const at::Tensor& tensor);
  void opaqueWriteEnds(const at::Tensor& tensor);

  // A collective that no operator shows is about to write to `tensor`.
  void collectiveWrites(const at::Tensor& tensor);

  // An outermost region begins. A recorder serves one after the other.
  void open(c10::intrusive_ptr<Graph> graph);

  // The innermost region's policy, index in Graph::names and counters, and Context::allRepeat.
  void enter(Decider* decider, uint16_t region, RegionCounters* counters, bool allRepeat);

  // The outermost region ends: no write that autograd has yet to count is outstanding any more.
  void close();

  // Then, without a lock: see Pinned.
  void tellPinned(const std::string& region) {
    pinned_.tell(region);
  }

  // Just before close(): empties what is held outside, but for the storages of `results`. With
  // `onlyResults` false what no op has read counts as a result too. Does nothing if no backward
  // would fill it again: there is no handle, and no `hasBackward`.
  void emptyEscapes(const std::vector<at::Tensor>& results, bool onlyResults, bool hasBackward);

  const c10::intrusive_ptr<Graph>& graph() const {
    return context_.graph;
  }
  uint16_t region() const {
    return context_.region;
  }

 private:
  void callInplaceView(Call& call);
  void closeOthers(const c10::intrusive_ptr<Value>& entry);
  void closeLookahead(Lookahead& lookahead);

  Context context_;
  Sender sender_{context_};
  ValueMap values_{context_, sender_};
  RowMarks rows_{context_, values_, sender_};
  Results results_;
  ReadResults readResults_;
  Pinned pinned_;
  WeakGraph last_{c10::intrusive_ptr<Graph>()};    // recorded last
  WeakGraph before_{c10::intrusive_ptr<Graph>()};  // ... and before that
};

// This thread's recorder if it is inside a region; null otherwise.
Recorder* openRecorder();

}  // namespace ebb
