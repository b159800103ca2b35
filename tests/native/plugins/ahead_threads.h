// Tests of replays ahead with many threads.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace ebb {

// Several threads exclude storages from replays ahead and ask about them. Returns true if replays
// ahead may read exactly the storages that no thread has excluded.
bool handsAreKnown(size_t threads, size_t rounds);

// While one thread counts references, and has the lock of hands for that, another one does each of
// the other things that need the lock. Returns what did not wait.
std::vector<std::string> handsWithoutLock();

}  // namespace ebb
