#include "record/decide_on_written.h"

namespace ebb {

// Note [A write into a saved value]
// After an in-place op on a value that the policy saves, only the written storage is left to keep.
// The new state inherits the decision. Otherwise `relu_` after a saved convolution would undo the
// decision.
void decideOnWritten(Value& after, const Value& before, const Verdict& verdict) {
  if (recomputes(verdict.decision) && before.isSaved()) {
    after.inherit(before);
  } else if (verdict.decision != Decision::Recompute) {
    const bool wasToLeave = before.due || before.stash;
    const bool leaves = verdict.decision == Decision::Save && wasToLeave;
    after.decide(leaves ? Decision::Offload : verdict.decision);
  }
}

}  // namespace ebb
