// Making values again from their recipes.
#pragma once

#include <c10/core/Storage.h>

#include "graph/graph.h"
#include "graph/value.h"

namespace ebb {

// The storage that holds `value`, replaying the fewest recipes that bring it back. The caller holds
// the graph's lock and not the GIL. Throws, naming op, region and fix, if a leaf that a recipe
// needs was written or freed after the region.
c10::Storage materialise(Graph& graph, Value& value);

// What a replay that nobody waits for asks as it goes on. All of it is called under the graph's
// lock. See Note [Replays ahead of backward].
class AheadWatch {
 public:
  virtual ~AheadWatch() = default;

  // Whether `by` may read the bytes of `input`, which are in `storage`, before backward would.
  virtual bool mayRead(const Value& input, const c10::Storage& storage, const Recipe& by) = 0;

  // The bytes of what is away, for that; null if they may not be brought back yet. `living`: see
  // Stash.
  virtual c10::Storage fetch(Value& input, const c10::Storage& living) = 0;

  // Whether `recipe` may run now. If so it does, and then has run or has failed.
  virtual bool begin(const Recipe& recipe) = 0;
  virtual void end() = 0;
};

// Makes a value before backward asks, as far as `watch` allows; what is not made can be made later.
// Gives whether `watch` allowed all of it. Throws as materialise(), and then too.
bool materialiseAhead(Graph& graph, Value& value, AheadWatch& watch);

}  // namespace ebb
