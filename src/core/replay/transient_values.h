// Values that a slice (see Note [Replay]) recomputes only for other values, and frees again.
#pragma once

#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>

#include "graph/recipe.h"
#include "graph/value.h"

namespace ebb {

// See Note [Made each time]. Belongs to one slice; the graph's lock guards it.
class TransientValues {
 public:
  // The slice materialises `wanted`. `isBackward`: backward needs `wanted` now. Then other values
  // count as wanted too: all values of the nested region that made `wanted`, and outputs of the
  // same recipe that a handle needs.
  TransientValues(const Value& wanted, bool isBackward);

  // The slice runs a recipe, and no value is wanted.
  TransientValues() = default;

  // Frees the remaining values.
  ~TransientValues();
  TransientValues(const TransientValues&) = delete;
  TransientValues& operator=(const TransientValues&) = delete;

  // `reader` will run and needs `value`, a value to be recomputed.
  void needs(const Recipe& reader, Value& value) {
    if (value.decision().isMadeEachTime()) [[unlikely]] {
      Read& read = reads_[&value];
      read.last = std::max(read.last, reader.sequence);
    }
  }

  // True if `value` keeps its recipe although this slice recomputes it.
  bool staysUnmade(const Value& value) const {
    return value.decision().isMadeEachTime() && !isWanted(value);
  }

  // Called if staysUnmade(value). Gives `value` its `bytes` until the slice's last reader of the
  // value has run. Returns false, and stores nothing, if no recipe needs the value.
  bool made(Value& value, c10::Storage bytes);

  // True if hasRun(reader) will free `value`.
  bool isLastToRead(const Recipe& reader, const Value& value) const;

  // The slice has run `reader`. Frees the values that no later recipe of the slice reads.
  void hasRun(const Recipe& reader);

 private:
  struct Read {
    uint64_t last = 0;  // sequence of the slice's last reader of the value
    bool made = false;  // recomputed by this slice and not yet freed
  };

  bool isWanted(const Value& value) const;
  static bool isOver(const Read& read, const Recipe& reader) {
    return read.made && read.last == reader.sequence;
  }
  static void giveUp(Value& value, Read& read);

  c10::SmallVector<const Value*, 2> wanted_;
  uint32_t nested_ = 0;  // Recipe::nested of the region that backward has reached; 0: none
  // Recipes that will run keep the keys alive.
  ska::flat_hash_map<Value*, Read> reads_;
};

}  // namespace ebb
