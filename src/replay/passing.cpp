#include "replay/passing.h"

#include <algorithm>
#include <utility>

namespace ebb {

// Note [Made each time]
// Below one region's activations there is only making things more than once. A value with that
// decision, RECOMPUTE_EACH_TIME, is made for the others of a slice in passing:
// 1. It has its bytes from the run of its recipe until the last recipe of the slice that needs it
//    has run, and none if no recipe needs it. It keeps its recipe, so the next slice that needs it
//    makes it again.
// 2. If the slice is for it, it is held and drops its recipe, like any other: backward is there.
//    So is what the same run makes beside that and a handle waits for: a function asks for all
//    that its operator made, and would run it for each.
// 3. A recipe that stays keeps what it reads from being lost: that is a leaf, held since the first
//    slice that made it or brought it back, or has a recipe too. So a run may take the bytes of
//    what it writes if its own recipe goes and nothing else reads them; or if they are given up
//    after it anyway. Else it gets a copy.
// 4. What runs ahead of backward makes such values for others only. If backward needs one, it makes
//    it when it comes.

// What is wanted is decided once for a slice: handles die on any thread.
Passing::Passing(const Value& wanted, bool isBackward)
    : inner_(isBackward ? wanted.recipe->region : 0) {
  wanted_.push_back(&wanted);
  if (!isBackward || wanted.recipe->outputs.size() == 1) {
    return;
  }
  for (const Output& output : wanted.recipe->outputs) {
    const auto value = output.value.lock();
    if (value && value->isMadeEachTime() && value->handles > 0) {
      wanted_.push_back(value.get());
    }
  }
}

Passing::~Passing() {
  for (auto& [value, read] : reads_) {
    if (read.made) {
      giveUp(*value, read);
    }
  }
}

void Passing::giveUp(Value& value, Read& read) {
  read.made = false;
  if (value.recipe) {  // else a kernel has asked for it, one in Python: it is held
    value.giveUpAgain();
  }
}

bool Passing::isWanted(const Value& value) const {
  return std::find(wanted_.begin(), wanted_.end(), &value) != wanted_.end() ||
         isOfInnerRegion(value);
}

bool Passing::isOfInnerRegion(const Value& value) const {
  return inner_ != 0 && value.recipe && value.recipe->region == inner_;
}

bool Passing::made(Value& value, c10::Storage bytes) {
  const auto read = reads_.find(&value);
  if (read == reads_.end()) {
    return false;
  }
  read->second.made = true;
  value.materialiseInPassing(std::move(bytes));
  return true;
}

bool Passing::isLastToRead(const Recipe& reader, const Value& value) const {
  const auto read = reads_.find(const_cast<Value*>(&value));
  return value.recipe && read != reads_.end() && isOver(read->second, reader);
}

void Passing::hasRun(const Recipe& reader) {
  if (reads_.empty()) {
    return;
  }
  for (uint32_t i = 0; i < reader.inputCount; ++i) {
    const auto read = reads_.find(reader.inputs[i].value.get());
    if (read != reads_.end() && isOver(read->second, reader)) {
      giveUp(*read->first, read->second);
    }
  }
}

}  // namespace ebb
