// The buffers that one run of a recipe writes to.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include "graph/graph.h"
#include "graph/recipe.h"
#include "replay/passing.h"

namespace ebb {

// The buffers of one run for values that the op writes.
class Buffers {
 public:
  // `mayTake`: values may lend their own buffers. False if a failed run must leave all unchanged.
  Buffers(Graph& graph, const Recipe& recipe, const Passing& passing, bool mayTake)
      : graph_(graph), recipe_(recipe), passing_(passing), mayTake_(mayTake) {
  }

  // A private copy of the value of `input`, or the value's own buffer if nothing else needs the
  // buffer. All arguments that show the same value get the same buffer: the arguments aliased in
  // the forward.
  c10::Storage of(const Input& input);

  // The buffer for the value of `input`; null if there is none.
  const c10::Storage* find(const Input& input) const;

  // Values get their own buffers back, unless the kernel has begun to write. Returns false if a
  // value has lost its bytes.
  bool putBack(bool began);

 private:
  struct Buffer {
    Value* value;
    c10::Storage storage;
    bool isTaken;  // the buffer is the value's own
  };

  bool mayBeTaken(const Value& value) const;
  bool nothingNeeds(const Input& input, size_t ours) const;
  bool runsForTheLastTime() const;

  Graph& graph_;
  const Recipe& recipe_;
  const Passing& passing_;
  const bool mayTake_;
  c10::SmallVector<Buffer, 1> all_;
};

}  // namespace ebb
