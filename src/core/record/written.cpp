#include "record/written.h"

#include <algorithm>
#include <utility>

#include "graph/geometry.h"
#include "intercept/in_transit.h"

namespace ebb {
namespace {

// Note [A write into a saved value]
// An in-place op on a saved value overwrites the old bytes, so ebb can save only the value that the
// op wrote. That new value inherits the decision. Otherwise `relu_` after a saved convolution would
// undo the decision.
ValueDecision decideOnWritten(const Value& before, const Verdict& verdict) {
  if (recomputes(verdict.decision) && before.decision().isSaved()) {
    return ValueDecision(before.decision().chosen(), true, before.decision().rule());
  }
  const bool wasStored = before.decision().isDue() || before.stash();
  const bool stays = verdict.decision == Decision::Save && wasStored;
  const Decision chosen = stays ? before.decision().chosen() : verdict.decision;
  return ValueDecision(chosen, true, verdict.rule);
}

}  // namespace

void prepareWrites(
    ValueMap& values, const Call& call, const Arguments& arguments, const Recipe* recipe) {
  const bool returnsEarly = call.op.limits.asynchronous && !isSynchronous(call.op, call.arguments);
  for (const Write& write : arguments.writes()) {
    if (returnsEarly) {
      noteInTransit(write.tensor);
    }
    // Number of inputs that the op overwrites whole. A replay gives the op a new buffer for such an
    // input, and does not need the old state.
    size_t indifferent = 0;
    if (recipe) {
      indifferent =
          std::count_if(recipe->inputs().begin(), recipe->inputs().end(), [&](const Input& input) {
            return input.value.pointer() == write.before && input.wholeOverwrite;
          });
    }
    values.prepareForWrite(write.before, indifferent);
  }
}

c10::intrusive_ptr<Value> stateAfter(
    const Write& write, const OpTraits& op, const Verdict& verdict, bool decides) {
  const Value& before = *write.before;
  StateFacts facts = before.facts().afterWrite();
  facts.inTransit = op.limits.asynchronous;
  const bool mayDecide = !write.sideEffect && before.facts().madeHere && decides;
  const ValueDecision decision = mayDecide ? decideOnWritten(before, verdict)
                                           : ValueDecision(Decision::Recompute, true, verdict.rule);
  return c10::make_intrusive<Value>(write.tensor, facts, decision, &before.versions());
}

// True if a replay can repeat the write. A replay cannot repeat a whole write that no longer covers
// the storage: the kernel has shrunk an `out=`, and views still show the rest.
bool canBeRepeated(const Write& write) {
  return !write.sideEffect && (!write.whole || coversStorage(write.tensor));
}

}  // namespace ebb
