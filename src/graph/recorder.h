// The interceptor of a region: runs each op and writes down how its results were made.
#pragma once

#include <c10/util/flat_hash_map.h>

#include <memory>
#include <vector>

#include "graph/decider.h"
#include "graph/graph.h"
#include "graph/recipe.h"
#include "graph/rows.h"
#include "graph/value.h"
#include "intercept/interceptor.h"
#include "report/ledger.h"

namespace ebb {

// What a handle keeps of the tensor that autograd packed.
struct Packed {
  c10::intrusive_ptr<Value> value;  // null: unknown to the recorder, or a leaf; kept as in eager
  bool recompute = false;           // `value` is to be materialised; else its bytes are kept
  const char* producer = nullptr;   // the op that made it, for messages; null for a leaf
  EntryPtr entry;                   // null but while reports are recorded
};

class Recorder final : public Interceptor {
 public:
  Recorder() = default;
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void call(Call& call) override;
  void aliased(const at::Tensor& tensor, const at::Tensor& result) override;

  // The value that `tensor` shows has been given a name: the policy may decide anew.
  void name(const at::Tensor& tensor, const std::string& name);

  // Of `tensor` only the first rows live: see Note [Rows].
  void markRows(const at::Tensor& tensor, const at::Tensor& rows);

  // Called when autograd packs `tensor`, or a wrapper of which it is a part: decides whether its
  // bytes are kept or can be made again.
  Packed pack(const at::Tensor& tensor, bool part);

  // Around a write that torch does not see: see Note [Opaque writes].
  void opaqueWriteBegins(const at::Tensor& tensor);
  void opaqueWriteEnds(const at::Tensor& tensor);

  // An outermost region begins. A recorder serves one after the other.
  void open(c10::intrusive_ptr<Graph> graph);

  // The innermost region's policy, index in Graph::names and counters.
  void enter(Decider* decider, uint16_t region, RegionCounters* counters);

  // The outermost region ends: no write that autograd has yet to count is outstanding any more.
  void close();

  // Just before close(): empties what is held outside, but for the storages of `results`. With
  // `onlyResults` false what no op has read counts as a result too. Does nothing if no backward
  // would fill it again: there is no handle, and no `hasBackward`.
  void emptyEscapes(const std::vector<at::Tensor>& results, bool onlyResults, bool hasBackward);

  const c10::intrusive_ptr<Graph>& graph() const {
    return graph_;
  }
  uint16_t region() const {
    return region_;
  }

 private:
  friend class OpRecording;
  struct Unsettled {
    c10::intrusive_ptr<Value> after;   // whose stamp may be one short
    c10::intrusive_ptr<Value> before;  // the state it replaced, if autograd had packed that
    c10::Storage storage;              // of both, only if `before` is set
    c10::VariableVersion viewed;       // what an in-place view moved; else empty
  };

  // Lives as long as the thread: regions come again and again, so its table is kept.
  using Map = ska::flat_hash_map<c10::StorageImpl*, c10::intrusive_ptr<Value>>;

  c10::intrusive_ptr<Value>& currentValue(const at::Tensor& tensor);
  c10::intrusive_ptr<Value>& current(c10::intrusive_ptr<Value>& slot, const at::Tensor& tensor);
  void supersede(const c10::intrusive_ptr<Value>& value, size_t ownReferences);
  void settle();
  void makePrivate(Value& value);
  void storageGrew(const c10::intrusive_ptr<Value>& value, const c10::Storage& storage);
  void keep(Value& value, const at::Tensor& tensor);
  void send(Value& value, const c10::Storage& storage);
  bool sendToHost(Value& value, const c10::Storage& storage);
  bool sendToPages(Value& value, const c10::Storage& storage);
  void needDeadRows(const at::Tensor& tensor);
  RowCountPtr countOf(const at::Tensor& tensor, const at::Tensor& rows);
  static bool canLeave(const Value& value, const at::Tensor& tensor);
  void sendOrWait(Value& value, const at::Tensor& tensor);
  void needAll(Value& value, const at::Tensor& tensor);
  void sendKept(std::vector<c10::intrusive_ptr<Value>> values, size_t ownReferences);
  std::vector<c10::intrusive_ptr<Value>> keptToSend() const;
  bool offloadsInput(const at::Tensor& tensor) const;
  bool needsSweep() const;
  void sweep();
  void dropUnused();
  Value& replaceByLeaf(const at::Tensor& tensor);
  static bool ownsItsBytes(const Value& value);
  static void dropRecipe(Value& value);
  static c10::Storage escapedStorage(const c10::intrusive_ptr<Value>& value);
  static void closeOwned(Value& value);
  void closeOthers(const c10::intrusive_ptr<Value>& held);
  static bool mustOutliveNextWrite(const c10::intrusive_ptr<Value>& value);
  void callInplaceView(Call& call);

  // For reports; see Note [The journal].
  void noteMade(Value& value, const at::Tensor& tensor, const std::string& op, const char* reason);
  void notePacked(Value& value, bool kept);
  void noteCopied(Value& value);
  static void noteSent(
      Value& value, Fate fate, const char* kind, const std::string& of, size_t nbytes);
  struct Closing {
    EntryPtr entry;
    c10::weak_intrusive_ptr<Value> value;
    c10::weak_intrusive_ptr<c10::StorageImpl> home;
    bool droppable;  // its storage is there, and could be dropped
  };
  std::vector<Closing> noteClosing() const;
  static void noteClosed(const std::vector<Closing>& closing);

  c10::intrusive_ptr<Graph> graph_;     // shared with the handles; null between regions
  Decider* decider_ = nullptr;          // of the innermost region
  RegionCounters* counters_ = nullptr;  // of the innermost region
  uint16_t region_ = 0;                 // the innermost region's index in Graph::names
  Map values_;                          // see Note [Ownership]
  size_t sweepAt_ = 0;                  // entries at which dead ones are looked for
  size_t keptBytes_ = 0;                // since that was last done
  std::vector<Unsettled> unsettled_;    // see Note [Version stamps]
  // Storages with rows that autograd has packed since the last op: for the one that comes next, if
  // it is one of torch's own, which packs what it reads before it runs. Compared, never followed.
  c10::SmallVector<c10::StorageImpl*, 4> packedSince_;
  std::vector<RowCountPtr> rowCounts_;  // that were given in the outermost region
};

// Moves the version of a tensor that was written unseen, if more than `ours` values know its
// storage: graphs that may need its old contents.
void moveVersionIfNeeded(const at::Tensor& tensor, size_t ours);

}  // namespace ebb
