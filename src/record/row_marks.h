// Which rows live, as the user has said it in the open region: see Note [Rows].
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

  // Of `tensor` only the first rows live. Throws as ebb::markRows.
  void mark(const at::Tensor& tensor, const at::Tensor& rows);

  // Whether anything has rows.
  bool any() const {
    return !counts_.empty();
  }

  // Autograd packs `tensor`, which has rows.
  void packed(const at::Tensor& tensor) {
    packedSince_.push_back(storageOf(tensor));
  }

  // An operator that may mix rows is about to read `tensor`. If it has packed it too, its backward
  // may do so: the value is then neither paged nor made again, but kept.
  void needDeadRows(const at::Tensor& tensor);

  // The next operator comes.
  void opBegins() {
    packedSince_.clear();
  }

  void clear();

 private:
  // Tensors for which the same count was given may be read by one operator.
  RowCountPtr countOf(const at::Tensor& tensor, const at::Tensor& rows);

  const Context& context_;
  ValueMap& values_;
  Sender& sender_;
  std::vector<RowCountPtr> counts_;  // that were given in the outermost region
  // Storages with rows that autograd has packed since the last op: for the one that comes next, if
  // it is one of torch's own, which packs what it reads before it runs. Compared, never followed.
  c10::SmallVector<c10::StorageImpl*, 4> packedSince_;
};

}  // namespace ebb
