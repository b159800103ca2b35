// Whether there are cores to spare.
#pragma once

namespace ebb {

// Whether there is a core for each intra-op thread of backward, and of a replay beside it. Cores
// are those that this process may use at a time: of its affinity, and its cgroup's share.
bool hasIdleCores();

}  // namespace ebb
