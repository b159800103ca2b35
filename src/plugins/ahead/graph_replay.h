// The replay of one graph ahead of backward.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <optional>
#include <vector>

#include "ebb/export.h"
#include "graph/graph.h"
#include "plugins/ahead/lookahead.h"
#include "plugins/ahead/recipe_scope.h"
#include "replay/replay.h"

namespace ebb {

// The reason why a replay ahead of a graph ended.
enum class AheadEnd : uint8_t {
  Done,     // all values that handles wait for are available
  Asked,    // backward has arrived, or the thread is to end
  Stopped,  // some value cannot be replayed ahead
};

// Materialises the values that a graph's handles wait for, in the order of recording. Between two
// recipes the replay ends if another thread is about to unpack a value of the graph.
class GraphReplay final : public ReplayWatch {
 public:
  // `ends`: becomes true when the thread is to end.
  GraphReplay(Graph& graph, const std::atomic<bool>& ends);

  // Throws what a replay throws. Values that were materialised before stay.
  AheadEnd run();

  bool mayRead(const Value& input, const c10::Storage& storage, const Recipe& by) override;
  c10::Storage fetch(Value& input, const c10::Storage& living) override;
  bool begin(const Recipe& recipe) override;
  void end() override;

 private:
  // A value recomputed only for other values, or RECOMPUTE_EACH_TIME. Its bytes are freed when the
  // recipes that read the bytes have run.
  struct Intermediate {
    c10::weak_intrusive_ptr<Value> value;
    size_t nbytes;
  };

  bool makeNext();
  bool leave(AheadEnd why);
  bool allows(const Recipe& recipe);
  bool mayReadInputs(const Recipe& recipe);
  bool hasSettings(const NumericSettings& settings);
  // Takes from the budget the bytes that the replay of `recipe` will make. Returns false if the
  // limit is reached: then the replay ends, and what the graph has taken is given back when
  // backward arrives or the graph dies.
  bool takeFromBudget(const Recipe& recipe);
  void forgetFreed();

  Graph& graph_;
  Lookahead& lookahead_;
  const std::atomic<bool>& ends_;
  size_t next_ = 0;          // index into Lookahead::wanted
  bool isPartLeft_ = false;  // backward must materialise a value that was skipped
  std::vector<Intermediate> intermediates_;
  std::optional<AheadRecipeScope> scope_;  // while a recipe runs
  AheadEnd why_ = AheadEnd::Done;
};

// For tests: a worker replays each graph as soon as recording has ended, while the program goes on.
EBB_API extern std::atomic<bool> replaysWhenClosed;
// For tests: true if no worker has anything left to do.
EBB_API bool replaysAheadAreIdle();
// For tests: called before each recipe that runs ahead, with the recipe's place in the order of
// recording; may be null.
EBB_API extern std::atomic<void (*)(uint64_t sequence)> beforeReplayAhead;

}  // namespace ebb
