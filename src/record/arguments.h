// What one intercepted call is given: the tensors among its arguments, and what it writes.
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

// One tensor argument, or element of a list of them.
struct Argument {
  const at::Tensor* tensor;  // undefined only in lists
  GeometryFlags flags;
  ArgUse use;
  uint16_t index;   // on the stack
  int32_t element;  // in a list; -1: not a list
};

// One storage that the op writes.
struct Write {
  c10::StorageImpl* storage;         // compared, not owned: `tensor` does
  at::Tensor tensor;                 // one of the arguments that show it
  c10::intrusive_ptr<Value> before;  // the state that is written over
  uint16_t argument;                 // where `tensor` was
  int32_t element;                   // index in a list argument; -1: not a list
  bool whole;                        // the old contents do not matter
  bool counted;                      // its version will move; see Note [Version stamps]
  uint32_t version;                  // before the op
  bool sideEffect;                   // ArgUse::Scratch
  bool ahead;                        // see Note [Versions that move first]
};

class Arguments {
 public:
  // Looks at all arguments; finds the values that the op writes. Under the graph's lock.
  Arguments(const Call& call, ValueMap& values, bool allRepeat);

  const c10::SmallVector<Argument, 4>& tensors() const {
    return tensors_;
  }
  const c10::SmallVector<Write, 1>& writes() const {  // one per written storage
    return writes_;
  }

  // Every tensor argument can be held by a recipe.
  bool areRecordable() const {
    return recordable_;
  }

  // Some tensor argument is on a device: the first such one; the CPU if none is.
  bool areOffCpu() const {
    return !device_.is_cpu();
  }
  c10::Device device() const {
    return device_;
  }

  // See Note [A recipe is one block]
  uint32_t shapeCount() const {
    return shapeCount_;
  }

  // See Note [Writes to leaves]
  bool writesCanBeReplayed() const;

  // Whether `storage` is one of theirs, or was added; from now on it is.
  bool add(c10::StorageImpl* storage);

 private:
  void scan(const at::Tensor& tensor, size_t argument, int32_t element);
  void addWrite(
      const at::Tensor& tensor, ArgUse use, size_t argument, int32_t element, bool counted);
  bool isAhead(const at::Tensor& tensor);
  bool isUnfilled(const at::Tensor& tensor) const;
  ArgUse useOf(size_t argument) const {
    return op_.useOf(argument, condition_);
  }

  const OpTraits& op_;
  ValueMap& values_;
  const bool allRepeat_;   // see Note [Operators from elsewhere]
  bool condition_ = true;  // what OpTraits::conditionArgument says
  bool recordable_ = true;
  c10::Device device_ = c10::kCPU;
  uint32_t shapeCount_ = 0;
  c10::SmallVector<c10::StorageImpl*, 6> storages_;  // results may alias them
  c10::SmallVector<Argument, 4> tensors_;            // the recipe's inputs
  c10::SmallVector<Write, 1> writes_;
};

}  // namespace ebb
