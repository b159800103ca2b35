// Recomputes values from their recipes.
#pragma once

#include <c10/core/Storage.h>

#include "graph/graph.h"
#include "graph/value.h"
#include "replay/replay_lock.h"

namespace ebb {

// Returns the storage of `value`, after replaying as few recipes as possible. If a needed leaf was
// written or freed after the region, throws an error with op, region and fix.
c10::Storage materialise(const ReplayLock& locked, Value& value);

// Runs `recipe`, after the recipes of the inputs that it lacks, even if nothing needs its results.
void runRecipe(const ReplayLock& locked, c10::intrusive_ptr<Recipe> recipe);

// Decides how far a replay may go that backward has not asked for. All methods are called under the
// graph's lock.
class ReplayWatch {
 public:
  virtual ~ReplayWatch() = default;

  // True if recipe `by` may read the bytes of `input`, in `storage`, before backward would.
  virtual bool mayRead(const Value& input, const c10::Storage& storage, const Recipe& by) = 0;

  // The bytes of an `input` in state Away; null if the bytes may not be brought back yet. `living`:
  // see Stash.
  virtual c10::Storage fetch(Value& input, const c10::Storage& living) = 0;

  // True if `recipe` may run now. If so, the caller runs the recipe next.
  virtual bool begin(const Recipe& recipe) = 0;
  // The recipe has run, or has failed.
  virtual void end() = 0;
};

// Materialises `value` before backward needs it, as far as `watch` allows. If `watch` stops the
// replay, the results of the recipes that have run stay, and a later call runs the others. Returns
// true if `watch` allowed everything. Throws as materialise() does.
bool materialiseWatched(const ReplayLock& locked, Value& value, ReplayWatch& watch);

}  // namespace ebb
