// One intercepted call: runs the op and records its results. Lives on the stack of Recorder::call.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "graph/recipe.h"
#include "kernel/random_state.h"
#include "record/arguments.h"
#include "record/context.h"
#include "record/row_flow.h"
#include "record/row_marks.h"
#include "record/sender.h"
#include "record/value_map.h"

namespace ebb {

// Note [Code that ops seldom need]
// Recording runs between torch's kernels, which leave cold caches, so each touched line of code
// costs time. Code for few ops is marked `gnu::cold`, so the compiler places the code elsewhere.
// Code for many but not all ops is marked `gnu::noinline`. See docs/design/record.md.
//
// OpRecording is one call of an operator, from arguments to results. OpRecording has many members,
// since later stages of the call need the results of earlier stages.
class OpRecording {
 public:
  // Takes the lock of the context's graph.
  OpRecording(
      const Context& context, ValueMap& values, Sender& sender, RowMarks& marks, Call& call);

  void run();

 private:
  // Sets the policy's verdict, and the recipe or the obstacle to one.
  void writeRecipe();
  void noteStream();
  void scanRows();
  bool readsLossy() const {
    return flow_ && flow_->isLossy();
  }
  void lockAgain();
  void runKernel();
  void runUntrusted();
  void runConvolution();
  void runRandomKernel();
  void recover(bool draws);
  // Note [Operators from elsewhere]
  // A custom operator, that is, one from outside torch, may keep state that no schema shows: a step
  // counter, a generator, a cache. A second run would then silently give another result. So ebb
  // keeps the results, with two exceptions. A rule of the policy that matches the operator declares
  // it repeatable. A checkpointed call declares all inner operators repeatable
  // (Context::allRepeat), since torch's checkpoint would run them again. In both cases, ebb
  // compares the results of the replay with the forward's: on the CPU by fingerprints, on other
  // devices in verify mode only. In a checkpointed call on the CPU, such an operator may also fill
  // a result of `empty`. There a fingerprint shows that no other code has written to the memory
  // before, so a replay may use new memory.
  bool isTrusted(const Verdict& verdict) const {
    return !op_.limits.untrusted || context_.allRepeat || verdict.named;
  }
  Verdict verdictOn(const at::Tensor& result) const;
  void noteMade(Value& value, const at::Tensor& tensor, const Verdict& verdict);
  const char* findObstacle() const;
  const char* whyNotRecomputed(const Value& value, const at::Tensor& tensor) const;
  void noteCall();
  void noteRun();
  void recordWrites();
  // Gives the state after a write its recipe, or keeps it.
  void giveRecipe(
      const c10::intrusive_ptr<Value>& after, const Write& write, const Verdict& verdict);
  void recordOutputs();
  void recordOutput(const at::Tensor& tensor, size_t slot, int32_t element);
  // Applies the policy's decision to a result, and gives the result its recipe.
  void decideOnResult(
      const c10::intrusive_ptr<Value>& value,
      const at::Tensor& tensor,
      const Verdict& verdict,
      uint16_t slot,
      int32_t element);
  // Makes `value`, which `tensor` shows, an output of the recipe.
  void addOutput(const c10::intrusive_ptr<Value>& value, const at::Tensor& tensor, Output output);
  void learnAlias(const at::Tensor& tensor);
  void pinIfFromElsewhere(const c10::intrusive_ptr<Value>& value, const Verdict& verdict);

  const Context& context_;
  ValueMap& values_;
  Sender& sender_;
  RowMarks& marks_;
  Call& call_;
  const OpTraits& op_;                    // of call_
  std::unique_lock<PythonMutex> lock_;    // see Note [One lock per graph]
  Verdict verdict_;                       // the policy's verdict on this op
  const char* obstacle_ = nullptr;        // why the op cannot be replayed; null if it can
  std::optional<RowFlow> flow_;           // none if no tensor has rows; see Note [Rows]
  const c10::IValue* results_ = nullptr;  // set after the op has run
  Arguments arguments_;
  c10::intrusive_ptr<Recipe> recipe_;   // null if the op cannot be replayed
  std::unique_ptr<OperatorLine> note_;  // null except for a profile
};

}  // namespace ebb
