// A thread's position in a pipeline.
#pragma once

#include <cstdint>
#include <optional>

#include "ebb/export.h"

namespace ebb {

struct PipelinePlace {
  int32_t stage = 0;
  std::optional<int32_t> microbatch;  // nothing: micro-batches are counted

  bool operator==(const PipelinePlace&) const = default;
};

// The latest place that the user set on this thread.
EBB_API PipelinePlace pipelinePlace();

// Sets the place and returns the previous place.
EBB_API PipelinePlace exchangePipelinePlace(PipelinePlace place);

}  // namespace ebb
