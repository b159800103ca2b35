// The buffers that one run of a recipe writes to.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include "graph/graph.h"
#include "graph/recipe.h"
#include "replay/transient_values.h"

namespace ebb {

// The buffers of one run, one for each value that the op writes.
class Buffers {
 public:
  // `mayTake`: the op may write to values' own buffers. False if a failed run must leave all values
  // unchanged.
  Buffers(Graph& graph, const Recipe& recipe, const TransientValues& transient, bool mayTake)
      : graph_(graph), recipe_(recipe), transient_(transient), mayTake_(mayTake) {}

  // A private copy of the value of `input`, or the value's own buffer if nothing else needs the
  // buffer. Arguments that aliased in forward refer to one value, and get the same buffer.
  c10::Storage of(const Input& input);

  // The buffer that of() made for the value of `input`; null if there is none.
  const c10::Storage* find(const Input& input) const;

 private:
  struct Buffer {
    Value* value;
    c10::Storage storage;
  };

  bool mayBeTaken(const Value& value) const;
  bool nothingNeeds(const Input& input, size_t ours) const;
  bool runsForTheLastTime() const;

  Graph& graph_;
  const Recipe& recipe_;
  const TransientValues& transient_;
  const bool mayTake_;
  c10::SmallVector<Buffer, 1> all_;
};

}  // namespace ebb
