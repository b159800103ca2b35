// Which operators keep rows apart.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>

#include "graph/rows.h"
#include "graph/value.h"
#include "intercept/op_traits.h"

namespace ebb {

// The rows of a storage of `nbytes` bytes that `tensor` shows: how many it shows them as. 0 if the
// tensor shows them in another way than one after the other.
int64_t rowsShown(const at::Tensor& tensor, const Rows& rows, size_t nbytes);

// What one call does with rows: fed with its arguments before it runs, asked about its results
// after.
class RowFlow {
 public:
  RowFlow(const OpTraits& op, const c10::IValue* arguments) : op_(op), arguments_(arguments) {
  }

  // An argument that is read, and shows `value`; null: it has no rows, as far as is known.
  void add(const at::Tensor& tensor, size_t argument, const Value* value);

  // Whether all that has rows is read row by row. All arguments have been added.
  bool keepsApart() const;

  // The rows of a result that is a storage of its own; null if it has none.
  std::unique_ptr<Rows> of(const at::Tensor& result) const;

  // The rows that are left of a storage that had some, after the call has written `argument`.
  std::unique_ptr<Rows> ofWritten(const at::Tensor& argument, const Value& before) const;

  // Whether anything is read that has rows, and more of it than its shape.
  bool readsRows() const {
    return live_ && op_.rows != RowRule::ShapeOnly;
  }

  // Whether a result without rows cannot be made again.
  bool isLossy() const {
    return lossy_ && op_.rows != RowRule::ShapeOnly;
  }

 private:
  bool keepsApart(const at::Tensor& tensor, size_t argument) const;

  // Of an argument without rows.
  struct Extent {
    int64_t dimensions;
    int64_t leading;  // the first size
    size_t argument;
  };
  const OpTraits& op_;
  const c10::IValue* arguments_;
  RowCountPtr live_;                     // null: no argument has rows
  int64_t total_ = 0;                    // of the storages
  int64_t leading_ = 0;                  // the first size of the arguments that have rows
  int64_t dimensions_ = 0;               // the number of their sizes
  c10::SmallVector<Extent, 4> extents_;  // of the arguments without
  bool apart_ = true;                    // so far: rows are kept apart
  bool lossy_ = false;                   // some argument is
};

}  // namespace ebb
