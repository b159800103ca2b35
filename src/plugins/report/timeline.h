// The memory held for backward over time, with ebb and in eager.
#pragma once

#include <deque>

#include "ebb/report.h"
#include "plugins/report/input_records.h"

namespace ebb {

// Adds both curves and their peaks. Long curves lose points, but not the peak of held memory.
void addTimeline(
    Report& report, const std::deque<ValueRecord>& records, const InputRecords& inputs,
    TraceTime now);

}  // namespace ebb
