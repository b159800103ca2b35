// Values that a slice makes for others, and gives up again.
#pragma once

#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>

#include "graph/recipe.h"
#include "graph/value.h"

namespace ebb {

// See Note [Made each time]. Of one slice, under the graph's lock.
class Passing {
 public:
  // `wanted` is what the slice is for. `isBackward`: backward asks for it, and so for all that its
  // inner region made, and for what its recipe makes beside it and a handle waits for.
  Passing(const Value& wanted, bool isBackward);

  // What is left is given up.
  ~Passing();
  Passing(const Passing&) = delete;
  Passing& operator=(const Passing&) = delete;

  // `reader` will run, and needs `value`, which has to be made.
  void needs(const Recipe& reader, Value& value) {
    if (value.isMadeEachTime()) [[unlikely]] {
      Read& read = reads_[&value];
      read.last = std::max(read.last, reader.sequence);
    }
  }

  // Whether `value` keeps its recipe, though this slice makes it.
  bool staysUnmade(const Value& value) const {
    return value.isMadeEachTime() && !isWanted(value);
  }

  // Such a value is there: in `bytes`, until the last recipe that needs it has run. False, and it
  // is not, if none does.
  bool made(Value& value, c10::Storage bytes);

  // Whether such a value is given up when `reader` has run.
  bool isLastToRead(const Recipe& reader, const Value& value) const;

  // Gives up what nothing in the slice needs any more.
  void hasRun(const Recipe& reader);

 private:
  struct Read {
    uint64_t last = 0;  // sequence of the last recipe of the slice that needs it
    bool made = false;  // by this slice, and not yet given up
  };

  bool isWanted(const Value& value) const;
  bool isOfInnerRegion(const Value& value) const;
  static bool isOver(const Read& read, const Recipe& reader) {
    return read.made && read.last == reader.sequence;
  }
  static void giveUp(Value& value, Read& read);

  c10::SmallVector<const Value*, 2> wanted_;
  uint16_t inner_ = 0;  // the inner region that backward has come to; 0: none
  // What is made, the recipes that will read it keep alive.
  ska::flat_hash_map<Value*, Read> reads_;
};

}  // namespace ebb
