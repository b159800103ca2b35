// Memory near a device.
#pragma once

#include <cstddef>
#include <string>

namespace ebb {

// Note [Memory near the device]
// On a machine with several memory nodes (NUMA) copies between a device and another node's memory
// are slower, on some a third as fast. A process that is not bound to its device's node gets memory
// wherever it happens to run. So pinned memory is put on the node of the device that it is for, as
// long as there is room; a binding of the process that leaves no choice stays in force.

// The node nearest to a PCI device, such as 0000:3B:00.0; -1 if the system does not say.
int nodeOfPciDevice(const std::string& busId);

// Pages of `memory` that are not in use yet will be on `node`, if possible.
void preferNode(void* memory, size_t nbytes, int node);

}  // namespace ebb
