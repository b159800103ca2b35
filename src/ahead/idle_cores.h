// Whether there are cores to spare.
#pragma once

namespace ebb {

// Cores that this process may use at a time: of its affinity, and its cgroup's share.
int usableCores();

}  // namespace ebb
