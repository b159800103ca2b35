// One graph, replayed before backward asks.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <optional>
#include <vector>

#include "ebb/export.h"
#include "graph/graph.h"
#include "memory/stillness.h"
#include "replay/replay.h"

namespace ebb {

// Why a graph was left.
enum class AheadEnd : uint8_t {
  Done,     // all is there that handles wait for
  Asked,    // backward is there, or the thread is to end
  Stopped,  // something cannot be made ahead
  Threads,  // this thread has another number of intra-op threads than the forward had
};

// Materialises what the handles of a graph wait for, in the order of recording, and gives way
// between recipes to whoever asks for the graph.
class GraphReplay final : public AheadWatch {
 public:
  // `ends`: is true when the thread is to end.
  GraphReplay(Graph& graph, const std::atomic<bool>& ends);

  // Throws what a replay throws. What has been made stays.
  AheadEnd run();

  bool mayRead(const Value& input, const c10::Storage& storage, const Recipe& by) override;
  c10::Storage fetch(Value& input, const c10::Storage& living) override;
  bool begin(const Recipe& recipe) override;
  void end() override;

 private:
  // Bytes that no handle waits for, or not now: they go when the recipes that read them have run.
  struct Passing {
    c10::weak_intrusive_ptr<Value> value;
    size_t nbytes;
  };

  bool makeNext();
  bool leave(AheadEnd why);
  bool allows(const Recipe& recipe);
  bool mayReadInputs(const Recipe& recipe);
  bool hasSettings(const NumericSettings& settings);
  bool takeRoomFor(const Recipe& recipe);
  void forgetPassed();

  Graph& graph_;
  Lookahead& lookahead_;
  const std::atomic<bool>& ends_;
  size_t next_ = 0;          // of Lookahead::wanted
  bool isPartLeft_ = false;  // to backward, of what has been passed there
  std::vector<Passing> passing_;
  std::optional<Stillness> still_;  // while a recipe runs
  std::optional<ReadAhead> reads_;  // likewise
  AheadEnd why_ = AheadEnd::Done;
};

// For tests: called before each recipe that runs ahead, with its place in the order of recording.
// Null: nothing is called.
EBB_API extern std::atomic<void (*)(uint64_t sequence)> beforeReplayAhead;

}  // namespace ebb
