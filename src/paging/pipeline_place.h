// Where in a pipeline a thread's regions are.
#pragma once

#include <cstdint>
#include <optional>

#include "ebb/export.h"

namespace ebb {

struct PipelinePlace {
  int32_t stage = 0;
  std::optional<int32_t> microbatch;  // nothing: they are counted

  bool operator==(const PipelinePlace&) const = default;
};

// As this thread's user named it last.
EBB_API PipelinePlace pipelinePlace();

// Gives the one before.
EBB_API PipelinePlace exchangePipelinePlace(PipelinePlace place);

}  // namespace ebb
