// A stream beside the stream of backward: see Note [Side streams].
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <optional>

#include "graph/graph.h"

namespace ebb {

// The side stream of one device, for one thread.
class SideStream {
 public:
  explicit SideStream(c10::Device device) : device_(device) {
  }

  // Returns the side stream, after making it wait for all work that produced the inputs of `graph`.
  // `compute` is the stream on which `graph` was recorded, and backward will run. Called under the
  // graph's lock.
  c10::Stream after(c10::Stream compute, Graph& graph);

 private:
  const c10::Device device_;
  std::optional<c10::Stream> stream_;  // created when first needed
  std::optional<c10::Stream> waited_;  // the compute stream for which the side stream has waited
  uint64_t waitedAfter_ = 0;           // Lookahead::closings() at that time
};

}  // namespace ebb
