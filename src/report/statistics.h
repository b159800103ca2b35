// The counters behind ebb::stats(). A region counts without atomics, and adds its counts when it
// ends.
#pragma once

#include <string>

#include "ebb/report.h"
#include "report/live_counts.h"
#include "report/transfer_account.h"

namespace ebb {

// Note [What a step is]
// A step begins when the counters are reset, or when an outermost region is entered after a
// backward has used an earlier region. So after a backward, and until the next forward, the
// statistics show exactly the last forward and backward.
void statisticsRegionEntered();
void statisticsBackwardSeen();
void statisticsDemoted(const std::string& op);
void statisticsAdd(const std::string& region, const RegionCounters& counters);
void statisticsFromOutside(const std::string& region, size_t nbytes);

// The account for this step's transfers of an op's values in a region. `op` is "input" for inputs.
TransferAccountPtr statisticsTransfers(const std::string& region, const std::string& op);

}  // namespace ebb
