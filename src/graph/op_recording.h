// One intercepted call: runs the op and records what it made. Lives on the stack of Recorder::call.
#pragma once

#include <mutex>
#include <optional>

#include "graph/random_state.h"
#include "graph/recorder.h"

namespace ebb {

class OpRecording {
 public:
  OpRecording(Recorder& recorder, Call& call);

  void run();

 private:
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
    int32_t element;                   // ... in a list; -1: not a list
    bool whole;                        // the old contents do not matter
    bool sideEffect;                   // ArgUse::Scratch
  };

  const c10::IValue* arguments() const {
    return call_.arguments;
  }
  ArgUse useOf(size_t argument) const {
    return op_.useOf(argument, training_);
  }

  void scanArguments();
  void scanRows();
  bool readsLossy() const {
    return rows_ && rows_->isLossy();
  }
  void scanTensor(const at::Tensor& tensor, size_t argument, int32_t element);
  void addWrite(const at::Tensor& tensor, size_t argument, int32_t element);
  bool writesCanBeReplayed() const;
  void makeRecipe();
  void addOthers();
  void addInputs();
  static bool readsBeyond(const OpTraits& op);
  void addValue(Input& input, const at::Tensor& tensor);
  void prepareWrites();
  void lockAgain();
  void runKernel();
  void runRandomKernel();
  uint64_t fingerprintOfResult() const;
  bool isTrusted(const Verdict& verdict) const;
  Verdict verdictOn(const at::Tensor& result) const;
  void noteMade(Value& value, const at::Tensor& tensor, const Verdict& verdict);
  const char* findObstacle() const;
  const char* whyNotRecomputed(const Value& value, const at::Tensor& tensor) const;
  void recordWrites();
  void recordOutputs();
  void recordOutput(const at::Tensor& tensor, size_t slot, int32_t element);
  void learnAlias(const at::Tensor& tensor);
  bool onlyResultsHold(const at::Tensor& tensor) const;

  Recorder& recorder_;
  Call& call_;
  const OpTraits& op_;                           // of call_
  std::unique_lock<std::recursive_mutex> lock_;  // see Note [One lock per graph]
  Verdict verdict_;                              // what the policy says about this op
  bool training_ = true;                         // the value of OpTraits::trainingArgument
  bool recordable_ = true;                       // every tensor argument can be held by a recipe
  bool readsOpaque_ = false;                     // see Note [Opaque writes]
  const char* obstacle_ = nullptr;               // why it cannot be run again; null if it can
  std::optional<RowFlow> rows_;           // nothing where no tensor has rows; see Note [Rows]
  bool offCpu_ = false;                   // some tensor argument is on a device
  uint32_t shapeCount_ = 0;               // see Note [A recipe is one block]
  const c10::IValue* results_ = nullptr;  // once the op ran
  c10::SmallVector<c10::StorageImpl*, 6> storages_;  // of the arguments: results may alias them
  c10::SmallVector<Argument, 4> tensors_;            // the recipe's inputs
  c10::SmallVector<Write, 1> writes_;                // one per written storage
  c10::intrusive_ptr<Recipe> recipe_;                // null if the op cannot be replayed
};

}  // namespace ebb
