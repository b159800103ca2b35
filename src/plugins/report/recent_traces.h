// The traces of the last steps.
#pragma once

#include <cstdint>

#include "plugins/report/step_trace.h"

namespace ebb {

// The trace of the current step; null while reports are not recorded.
StepTracePtr currentTrace();

// From now on, ebb records into `profile` in place of the step's trace; null: into the step's
// trace again.
void putTraceInPlace(StepTracePtr profile);

// Called when a step begins, see Note [What a step is].
void traceStepBegins(uint64_t step);

}  // namespace ebb
