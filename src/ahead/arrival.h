// Replays that run ahead of backward: when they begin.
#pragma once

#include <ATen/core/TensorBody.h>

#include <memory>

#include "ebb/ahead.h"
#include "graph/graph.h"
#include "graph/lookahead.h"

namespace ebb {

// What a new graph gets: null while replays do not run ahead.
std::unique_ptr<Lookahead> newLookahead(const Graph& graph);

// A graph is recorded from now on, and no more.
void opened(const c10::intrusive_ptr<Graph>& graph);
void closed(const c10::intrusive_ptr<Graph>& graph);

// A region is about to be entered: see Note [Kept while there is room].
void makeRoom();

// Values of a graph with a Lookahead are asked for; most often by backward, which is there then.
EBB_API void arriveAt(Graph& graph);

inline void asksFor(Graph& graph) {
  if (graph.lookahead && !graph.lookahead->arrived.load(std::memory_order_acquire)) [[unlikely]] {
    arriveAt(graph);
  }
}

// Something that torch does not see is about to write to `tensor`: see Note [Hands on a storage].
EBB_API void beforeUnseenWrite(const at::Tensor& tensor);

// For tests: graphs are replayed from the moment they are closed, beside whatever comes then.
EBB_API void replayWhenClosed(bool on);
EBB_API bool replaysAheadAreIdle();

}  // namespace ebb
