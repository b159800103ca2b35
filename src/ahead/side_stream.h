// A stream beside backward's: see Note [Side streams].
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>

#include "graph/graph.h"

namespace ebb {

// Of one device and one thread.
class SideStream {
 public:
  explicit SideStream(c10::Device device) : device_(device) {
  }

  // The stream, which comes after all that made what `graph` reads: `compute` is the one on which
  // it was recorded, and backward will run. Under the graph's lock.
  c10::Stream after(c10::Stream compute, Graph& graph);

 private:
  const c10::Device device_;
  std::optional<c10::Stream> stream_;  // null until it is needed
  std::optional<c10::Stream> waited_;  // for which it has waited,
  uint64_t waitedAfter_ = 0;           // ... after so many closings of graphs
};

}  // namespace ebb
