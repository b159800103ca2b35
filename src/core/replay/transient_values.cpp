#include "replay/transient_values.h"

#include <algorithm>
#include <utility>

namespace ebb {

// Note [Made each time]
// If backward is to need less memory than all activations of one region, ops must run more than
// once. A value with the decision RECOMPUTE_EACH_TIME is recomputed in passing for the other values
// of a slice:
// 1. The bytes exist from the replay of the value's recipe until the last recipe of the slice that
//    reads them has run. Without such a recipe, the bytes are freed at once. The value keeps its
//    recipe, so the next slice can recompute the value.
// 2. If backward unpacks the value itself, the value stays in memory and drops its recipe, like any
//    other value. The same holds for other outputs of the same replay that a handle needs: a
//    backward function unpacks all of these outputs, and each would otherwise cause a replay. If a
//    nested region computed the unpacked value, all values of that nested region that the slice
//    recomputes stay in memory too. A region that is entered twice counts as two regions, and
//    names do not matter.
// 3. A recipe that is not dropped will need its inputs again. Each input is a leaf, or has a recipe
//    too, or stays in memory after its first recomputation or reload. So a replay may write to an
//    input's own buffer in two cases: the recipe is dropped afterwards and nothing else reads the
//    buffer, or the slice would free the buffer after this replay. Otherwise the replay writes to a
//    copy.
// 4. A replay ahead of backward recomputes such values only for other values. If backward unpacks
//    such a value itself, backward recomputes it then.

// The wanted values are determined once per slice, because another thread may drop handles while
// the slice runs.
TransientValues::TransientValues(const Value& wanted, bool isBackward)
    : nested_(isBackward ? wanted.recipe()->nested : 0) {
  wanted_.push_back(&wanted);
  if (!isBackward || wanted.recipe()->outputs.size() == 1) {
    return;
  }
  for (const Output& output : wanted.recipe()->outputs) {
    const auto value = output.value.lock();
    if (value && value->decision().isMadeEachTime() && value->uses().handles() > 0) {
      wanted_.push_back(value.get());
    }
  }
}

TransientValues::~TransientValues() {
  for (auto& [value, read] : reads_) {
    if (read.made) {
      giveUp(*value, read);
    }
  }
}

void TransientValues::giveUp(Value& value, Read& read) {
  read.made = false;
  if (value.recipe()) {  // else a kernel in Python has unpacked the value, which stays Held
    value.release();
  }
}

bool TransientValues::isWanted(const Value& value) const {
  return std::find(wanted_.begin(), wanted_.end(), &value) != wanted_.end() ||
         (nested_ != 0 && value.recipe() && value.recipe()->nested == nested_);
}

bool TransientValues::made(Value& value, c10::Storage bytes) {
  const auto read = reads_.find(&value);
  if (read == reads_.end()) {
    return false;
  }
  read->second.made = true;
  value.holdAlone(std::move(bytes));
  return true;
}

bool TransientValues::isLastToRead(const Recipe& reader, const Value& value) const {
  const auto read = reads_.find(const_cast<Value*>(&value));
  return value.recipe() && read != reads_.end() && isOver(read->second, reader);
}

void TransientValues::hasRun(const Recipe& reader) {
  if (reads_.empty()) {
    return;
  }
  for (const Input& input : reader.inputs()) {
    const auto read = reads_.find(input.value.get());
    if (read != reads_.end() && isOver(read->second, reader)) {
      giveUp(*read->first, read->second);
    }
  }
}

}  // namespace ebb
