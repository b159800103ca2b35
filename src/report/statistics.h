// The books that ebb::stats() reads. Regions count without atomics and hand in when they end.
#pragma once

#include <string>

#include "ebb/report.h"
#include "report/live_counts.h"
#include "report/transfer_account.h"

namespace ebb {

// Note [What a step is]
// A step begins when an outermost region is entered after a backward has used an earlier one, or
// when the counters are reset. So after a backward, and until the next forward, the statistics show
// exactly the last forward and backward.
void statisticsRegionEntered();
void statisticsBackwardSeen();
void statisticsDemoted(const std::string& op);
void statisticsAdd(const std::string& region, const RegionCounters& counters);
void statisticsFromOutside(const std::string& region, size_t nbytes);

// Where this step's transfers of an op's values in a region are booked. `op` is "input" for inputs.
TransferAccountPtr statisticsTransfers(const std::string& region, const std::string& op);

}  // namespace ebb
