// The arguments of one intercepted call: its tensors and its writes.
#pragma once

#include <ATen/core/TensorBody.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <optional>

#include "graph/geometry.h"
#include "graph/value.h"
#include "intercept/interceptor.h"
#include "intercept/op_traits.h"

namespace ebb {

class ValueMap;

using PartsInside = c10::SmallVector<at::Tensor, 3>;

// Returns the dense tensors inside a sparse or compressed tensor. For any other tensor with a
// storage, returns the storage's bytes. A write to the tensor may write to any of these parts.
PartsInside partsInside(const at::Tensor& tensor);

// One tensor argument, or one element of a list argument.
struct Argument {
  const at::Tensor* tensor;  // undefined only in lists
  GeometryFlags flags;
  ArgUse use;
  uint16_t index;   // on the stack
  int32_t element;  // in a list; -1: not a list
};

// One storage written by the op.
struct Write {
  c10::StorageImpl* storage;         // only compared; `tensor` owns the storage
  at::Tensor tensor;                 // an argument on the storage
  c10::intrusive_ptr<Value> before;  // the state before the write
  uint16_t argument;                 // index of the argument on the stack
  int32_t element;                   // index in a list argument; -1: not a list
  bool whole;                        // the old contents do not matter
  bool counted;                      // autograd will move the version; see Note [Version stamps]
  uint32_t version;                  // before the op
  bool sideEffect;                   // ArgUse::Scratch
  bool movedFirst;                   // see Note [Versions that move first]
};

class Arguments {
 public:
  // Scans all arguments and finds the written values. Called under the graph's lock.
  Arguments(const Call& call, ValueMap& values, bool trustCustomOps);

  const c10::SmallVector<Argument, 4>& tensors() const { return tensors_; }
  const c10::SmallVector<Write, 1>& writes() const {  // one per written storage
    return writes_;
  }

  // True if a recipe can hold every tensor argument.
  bool areRecordable() const { return recordable_; }

  // True if a tensor argument is not on the CPU.
  bool areOffCpu() const { return !device_.is_cpu(); }
  // Device of the first tensor argument off the CPU; else the CPU.
  c10::Device device() const { return device_; }

  // See Note [A recipe is one block]
  uint32_t shapeCount() const { return shapeCount_; }

  // See Note [Writes to leaves]
  bool writesCanBeReplayed() const;

  // Adds `storage`. Returns true if it is an argument's storage, or was added before.
  bool add(c10::StorageImpl* storage);

 private:
  void scan(const at::Tensor& tensor, size_t argument, int32_t element);
  void addWrite(
      const at::Tensor& tensor, ArgUse use, size_t argument, int32_t element, bool counted);
  bool acceptIfMovedFirst(const at::Tensor& tensor);
  bool isUnfilled(const at::Tensor& tensor) const;
  ArgUse useOf(size_t argument) const { return op_.arguments.useOf(argument, condition_); }

  const OpTraits& op_;
  ValueMap& values_;
  const bool trustCustomOps_;  // see Note [Custom operators]
  bool condition_ = true;  // false if the op has an ArgumentTraits::condition that does not hold
  bool recordable_ = true;
  c10::Device device_ = c10::kCPU;
  uint32_t shapeCount_ = 0;
  c10::SmallVector<c10::StorageImpl*, 6> storages_;  // results may alias these storages
  c10::SmallVector<Argument, 4> tensors_;            // the recipe's inputs
  c10::SmallVector<Write, 1> writes_;
};

}  // namespace ebb
