// One intercepted call: runs the op and records what it made. Lives on the stack of Recorder::call.
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
// Recording runs between torch's kernels, which leave cold caches, so each line of code that an op
// touches costs. What few ops need is marked `gnu::cold`, which puts it elsewhere, or
// `gnu::noinline`, where it is needed often but not by each op. See docs/design/record.md.
//
// One call of an operator, from its arguments to its results. Its members are many: what is found
// out at one stage of the call is needed at the next.
class OpRecording {
 public:
  // Takes the lock of the context's graph.
  OpRecording(
      const Context& context, ValueMap& values, Sender& sender, RowMarks& marks, Call& call);

  void run();

 private:
  void noteStream();
  void noteUses();
  void scanRows();
  bool readsLossy() const {
    return flow_ && flow_->isLossy();
  }
  void learnReads();
  void prepareWrites();
  void lockAgain();
  void runKernel();
  void runUntrusted();
  void runConvolution();
  void runRandomKernel();
  void recover(bool draws);
  // Something may be given back if an allocation fails: what regions keep, or what leaves.
  bool hasReserve() const {
    return context_.graph->lookahead || context_.counters->bytesOffloaded != 0;
  }
  uint64_t fingerprintOfResult() const;
  // Note [Operators from elsewhere]
  // An operator that is not torch's own may keep state that no schema shows: a step counter, a
  // generator, a cache. Run again it would give something else, silently. So its results are kept,
  // unless a rule of the policy matches it: that is the user's word that it can be repeated. A
  // checkpointed call is that word for all operators inside it (Context::allRepeat), since torch's
  // checkpoint would run them again. On the CPU the results of both runs are compared by
  // fingerprints in both cases; on other devices only verify mode compares. In a checkpointed call
  // on the CPU, such an operator may also fill a result of `empty`: there ebb can tell that nobody
  // else has filled that memory, so a replay may use fresh memory.
  bool isTrusted(const Verdict& verdict) const {
    return !op_.untrusted || context_.allRepeat || verdict.named;
  }
  Verdict verdictOn(const at::Tensor& result) const;
  void noteMade(Value& value, const at::Tensor& tensor, const Verdict& verdict);
  const char* findObstacle() const;
  const char* whyNotRecomputed(const Value& value, const at::Tensor& tensor) const;
  void noteCall();
  void noteRun();
  void recordWrites();
  void recordOutputs();
  void recordOutput(const at::Tensor& tensor, size_t slot, int32_t element);
  void learnAlias(const at::Tensor& tensor);
  void pinIfFromElsewhere(const c10::intrusive_ptr<Value>& value, const Verdict& verdict);

  const Context& context_;
  ValueMap& values_;
  Sender& sender_;
  RowMarks& marks_;
  Call& call_;
  const OpTraits& op_;                    // of call_
  std::unique_lock<PythonMutex> lock_;    // see Note [One lock per graph]
  Verdict verdict_;                       // what the policy says about this op
  const char* obstacle_ = nullptr;        // why it cannot be run again; null if it can
  std::optional<RowFlow> flow_;           // nothing where no tensor has rows; see Note [Rows]
  const c10::IValue* results_ = nullptr;  // once the op ran
  Arguments arguments_;
  c10::intrusive_ptr<Recipe> recipe_;   // null if the op cannot be replayed
  std::unique_ptr<OperatorLine> note_;  // null but for a profile
};

}  // namespace ebb
