// One intercepted call: runs the op and records its results. Lives on the stack of Recorder::call.
#pragma once

#include <memory>
#include <mutex>
#include <optional>

#include "conditions/random_state.h"
#include "graph/recipe.h"
#include "hooks/call_guard.h"
#include "record/arguments.h"
#include "record/context.h"
#include "record/value_map.h"

namespace ebb {

// Note [Code that ops seldom need]
// Recording runs between torch's kernels, which leave cold caches, so each touched line of code
// costs time. Code for few ops is marked `gnu::cold`, so the compiler places the code elsewhere.
// Code for many but not all ops is marked `gnu::noinline`. See docs/design/record.md.
//
// OpRecording is one call of an operator, from arguments to results. The members are results of
// stages that later stages of the call need.
class OpRecording {
 public:
  // Takes the lock of the context's graph.
  OpRecording(const Context& context, ValueMap& values, Call& call);

  void run();

 private:
  // How to replay the op, or why the op cannot be replayed.
  struct Replay {
    c10::intrusive_ptr<Recipe> recipe;  // null if there is an obstacle
    const char* obstacle = nullptr;

    void giveUp(const char* why) {
      recipe.reset();
      obstacle = why;
    }
  };

  // Sets `verdict_`, and sets `replay_` to a recipe, or to the reason why there is none.
  void writeRecipe();
  void runKernel();
  void runGuarded();
  void runRandomKernel();
  void forgetWritten();
  Verdict verdictOn(const at::Tensor& result) const;
  // True for torch's own operators, and for a custom operator that a rule of the policy or a
  // checkpointed call declares repeatable: a second call gives the same results.
  bool isTrusted(const Verdict& verdict) const {
    return !op_.limits.custom || context_.trusts(verdict);
  }
  // Tells the observers of a new value. `veto`: see ResultVeto.
  void tellMade(Value& value, const at::Tensor& tensor, const Verdict& verdict, const char* veto);
  const char* whyNotRecomputed(
      const Value& value, const at::Tensor& tensor, const char* veto) const;
  void recordWrites();
  // Gives `after`, the state after a write, its recipe. Without a recipe, its bytes must be kept.
  void giveRecipe(
      const c10::intrusive_ptr<Value>& after, const Write& write, const Verdict& verdict,
      const char* veto);
  void recordOutputs();
  void recordOutput(const at::Tensor& tensor, size_t slot, int32_t element);
  // Applies the policy's decision to a result, and gives the result its recipe if it can be
  // recomputed: whyNotRecomputed() has the reasons why not.
  void decideOnResult(
      const c10::intrusive_ptr<Value>& value, const at::Tensor& tensor, const Verdict& verdict,
      const char* veto, Output output);
  // Makes `value`, which `tensor` shows, an output of the recipe.
  void addOutput(const c10::intrusive_ptr<Value>& value, const at::Tensor& tensor, Output output);

  const Context& context_;
  ValueMap& values_;
  Call& call_;
  const OpTraits& op_;                    // of call_
  std::unique_lock<PythonMutex> lock_;    // see Note [One lock per graph]
  Verdict verdict_;                       // the policy's verdict on this op
  const c10::IValue* results_ = nullptr;  // set after the op has run
  Arguments arguments_;
  Replay replay_;
  std::unique_ptr<GuardedRun> guarded_;  // null: no guard follows the run
};

}  // namespace ebb
