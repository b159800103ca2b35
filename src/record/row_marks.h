// The user's marks of valid rows in the open region: see Note [Rows].
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "graph/geometry.h"
#include "graph/rows.h"
#include "record/context.h"

namespace ebb {

class Sender;
class ValueMap;

class RowMarks {
 public:
  RowMarks(const Context& context, ValueMap& values, Sender& sender)
      : context_(context), values_(values), sender_(sender) {
  }

  // Marks the first rows of `tensor` as valid. Throws as ebb::markRows does.
  void mark(const at::Tensor& tensor, const at::Tensor& rows);

  // True if the program has marked rows in the open region.
  bool any() const {
    return !counts_.empty();
  }

  // Autograd packs `tensor`, which has rows.
  void packed(const at::Tensor& tensor) {
    packedSince_.push_back(storageOf(tensor));
  }

  // An operator that may mix rows is about to read `tensor`. If autograd has packed `tensor` for
  // the operator, backward may mix rows too: then the value is kept, neither paged nor recomputed.
  void needDeadRows(const at::Tensor& tensor);

  // The next operator begins.
  void opBegins() {
    packedSince_.clear();
  }

  void clear();

 private:
  // The first `count` rows of `tensor`, which shows `value`, are valid.
  void setRows(Value& value, const at::Tensor& tensor, const RowCountPtr& count);
  // The count for `rows`. Marks with the same count share one object: the result of an operator has
  // valid rows only if all arguments that have rows share their count.
  RowCountPtr countOf(const at::Tensor& tensor, const at::Tensor& rows);

  const Context& context_;
  ValueMap& values_;
  Sender& sender_;
  std::vector<RowCountPtr> counts_;  // counts given in the outermost region
  // Storages with rows that autograd has packed since the last op. If the next op is torch's own,
  // autograd has packed them for this op, because autograd packs an op's inputs before the op
  // reaches ebb. The pointers are only compared.
  c10::SmallVector<c10::StorageImpl*, 4> packedSince_;
};

}  // namespace ebb
