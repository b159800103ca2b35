// Where the kernel puts memory.
#pragma once

namespace ebb {

// The memory node that was preferred for `memory`; -1 if none was.
int preferredNode(const void* memory);

}  // namespace ebb
