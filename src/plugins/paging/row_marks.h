// The user's marks of valid rows in the open region: see Note [Rows].
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <utility>
#include <vector>

#include "graph/value.h"
#include "hooks/observer.h"
#include "intercept/op_traits.h"
#include "plugins/paging/row_flow.h"
#include "record/context.h"
#include "stores/rows.h"

namespace ebb {

class ValueMap;

// The values with rows that one autograd node has saved: see Note [Dead rows]. Their counts and
// numbers of rows are equal. The node's handles keep this.
struct NodeRows final : Extra {
  explicit NodeRows(RowFacts rows) : rows(std::move(rows)) {}

  // True if all values of the node need the same kind of padding rows.
  bool pads() const { return several && rows.lossy && !mixes; }
  c10::Storage shown(Unpacked unpacked) override;

  RowFacts rows;         // lossy: one of the values is
  bool several = false;  // more than one value
  bool mixes = false;    // the node's operator may mix rows, so all values keep their padding
};
using NodeRowsPtr = c10::intrusive_ptr<NodeRows>;

// Follows the rows of one graph while its region is open.
class RowMarks final : public OpEvents, public RegionEvents, public ResultVeto {
 public:
  RowMarks(const Context& context, ValueMap& values) : context_(context), values_(values) {}

  // Marks the first rows of `tensor` as valid. Throws as ebb::markRows does.
  void mark(const at::Tensor& tensor, const at::Tensor& rows);

  void willRun(
      const Context& context, ValueMap& values, const Call& call, const Arguments& arguments,
      bool replayable) override;
  const char* whyNotReplayed(const NewState& state) override;
  void made(const Made& made) override;
  void decidedAgain(const Context& context, Value& value) override;
  ExtraPtr packed(Value& value, const at::Tensor& tensor, Retention retention) override;
  void left(const c10::intrusive_ptr<Graph>& graph) override;

 private:
  // Note [Values of one node]
  // An autograd node packs arguments of its operator before the operator reaches ebb, results
  // afterwards, and the tensors of a torch.autograd.Function after the last operator. Autograd
  // numbers the nodes of a thread, so a new node is one with a new number, with two exceptions in
  // torch's in-place operators. If backward needs the old contents, torch saves a clone, which
  // makes a node of its own. And after a write to a view, torch makes nodes for the view before it
  // saves the result.
  struct Node {
    NodeRowsPtr rows;                                            // null: no node
    c10::SmallVector<c10::weak_intrusive_ptr<Value>, 2> values;  // those saved
    uint64_t number = 0;                                         // number of the next node
    bool hasCloned = false;   // since the last pack, the only operator was clone
    bool hasRun = false;      // the node's operator has run
    bool hasWritten = false;  // and it writes to an argument
  };

  // True if the node that packs `tensor`, before node `number`, is `node_`.
  bool isNode(uint64_t number, const at::Tensor& tensor) const;
  void addToNode(Value& value);
  void keepNode();
  // The next operator begins. `mixes`: it may mix rows.
  void opBegins(const OpTraits& op, bool mixes);
  // An operator that may mix rows is about to read `tensor`. If autograd has packed `tensor` for
  // the operator, backward may mix rows too: then the value is kept, neither paged nor recomputed.
  void needDeadRows(const at::Tensor& tensor);
  // Keeps the bytes of `value`, shown by `tensor`: the value is neither paged nor recomputed.
  void keepWhole(Value& value, const at::Tensor& tensor);
  // The first `count` rows of `tensor`, which shows `value`, are valid.
  void setRows(Value& value, const at::Tensor& tensor, const RowCountPtr& count);
  // The count for `rows`. Marks with the same count share one object: the result of an operator has
  // valid rows only if all arguments that have rows share their count.
  RowCountPtr countOf(const at::Tensor& tensor, const at::Tensor& rows);

  const Context& context_;
  ValueMap& values_;
  std::vector<RowCountPtr> counts_;  // counts given in the outermost region
  // Storages with rows that autograd has packed since the last op. If the next op is torch's own,
  // autograd has packed them for this op, because autograd packs an op's inputs before the op
  // reaches ebb. The pointers are only compared.
  c10::SmallVector<c10::StorageImpl*, 4> packedSince_;
  Node node_;                    // the node that has packed last
  std::optional<RowFlow> flow_;  // of the op that runs
};

}  // namespace ebb
