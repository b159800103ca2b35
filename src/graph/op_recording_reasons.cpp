// Why an op's results are not recomputed: for the decision, and in words.
#include "graph/op_recording.h"

namespace ebb {

const char* OpRecording::findObstacle() const {
  if (!recordable_) {
    return "an argument is sparse, nested, of MKL-DNN or a class of its own";
  }
  if (op_.uninitialised) {
    return "what fills it may not be seen";
  }
  if (op_.neverReplayed && !verdict_.forced) {
    return "the operator is never run again; a rule with force=True would";
  }
  if (!isTrusted(verdict_)) {
    return "not one of torch's operators, and no rule names it";
  }
  return writesCanBeReplayed() ? nullptr : "it wrote to memory that was not made in the region";
}

// See Note [The journal]
[[gnu::cold]] void OpRecording::noteMade(
    Value& value, const at::Tensor& tensor, const Verdict& verdict) {
  lockAgain();
  const bool wanted = verdict.decision == Decision::Recompute && !value.saved;
  const bool can = value.recipe && !op_.constantFill;
  if (!value.recipe) {
    value.rule = verdict.rule;
  }
  recorder_.noteMade(
      value, tensor, op_.name, wanted && !can ? whyNotRecomputed(value, tensor) : nullptr);
}

// For a result without a recipe, or one that is kept though it has one.
[[gnu::cold]] const char* OpRecording::whyNotRecomputed(
    const Value& value, const at::Tensor& tensor) const {
  if (obstacle_ != nullptr) {
    return obstacle_;
  }
  if (offCpu_ && tensor.is_cpu()) {
    return "it came from the device to the CPU";
  }
  if (!value.born) {
    return "others hold its memory too";
  }
  if (readsLossy() && !value.rows) {
    return "it is made of rows that were paged, and may mix them";
  }
  if (op_.constantFill) {
    return "a constant that was read before an operator wrote to it";
  }
  return "a condition of the operator's call";
}

}  // namespace ebb
