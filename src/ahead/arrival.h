// Entry points of replays ahead of backward: when recording ends, and when backward arrives.
#pragma once

#include <ATen/core/TensorBody.h>

#include <memory>

#include "ebb/ahead.h"
#include "graph/graph.h"
#include "graph/lookahead.h"

namespace ebb {

// The Lookahead of a new graph. Null in verify mode, while a profile is recorded, and if both
// replays ahead and keepWhileThereIsRoom() are off.
std::unique_ptr<Lookahead> newLookahead(const Graph& graph);

// Recording of `graph` has begun.
void opened(const c10::intrusive_ptr<Graph>& graph);
// Recording of `graph` has ended.
void closed(const c10::intrusive_ptr<Graph>& graph);

// Called before a region is entered: see Note [Kept while there is room].
void makeRoom();

// A value of `graph`, which has a Lookahead, is about to be unpacked; usually by backward.
EBB_API void arriveAt(Graph& graph);

inline void asksFor(Graph& graph) {
  if (graph.lookahead && !graph.lookahead->hasArrived()) [[unlikely]] {
    arriveAt(graph);
  }
}

// Called before code that torch does not see may write to `tensor`: see Note [Hands on a storage].
EBB_API void beforeUnseenWrite(const at::Tensor& tensor);

// For tests: if `on`, a worker replays each graph as soon as recording has ended, while the program
// goes on.
EBB_API void replayWhenClosed(bool on);
// For tests: true if no worker has anything left to do.
EBB_API bool replaysAheadAreIdle();

}  // namespace ebb
