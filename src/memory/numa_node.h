// Placement of host memory near a device.
#pragma once

#include <cstddef>
#include <string>

namespace ebb {

// Note [Memory near the device]
// On a machine with several memory nodes (NUMA), copies between a device and another node's memory
// are slower, on some machines a third as fast. A process that is not bound to its device's node
// gets memory on the node where it happens to run. So pinned memory is placed on the node of its
// device, while that node has room. A binding of the process that leaves no choice stays in force.

// The node nearest to a PCI device, such as 0000:3B:00.0; -1 if unknown.
int nodeOfPciDevice(const std::string& busId);

// Untouched pages of `memory` will be placed on `node`, if possible.
void preferNode(void* memory, size_t nbytes, int node);

}  // namespace ebb
