// Tests of replays ahead with many threads.
#pragma once

#include <cstddef>

namespace ebb {

// Several threads exclude storages from replays ahead and ask about them. Returns true if replays
// ahead may read exactly the storages that no thread has excluded.
bool handsAreKnown(size_t threads, size_t rounds);

// In each round, a thread that holds an AheadRecipeScope begins a ProcessStateChange, which must
// not wait for the thread itself, while other threads take and release scopes. Returns true, or
// never returns.
bool stillThreadsAreKnown(size_t rounds);

// Counts the weak references to an excluded storage while another thread excludes `storages`
// others. Returns true if each count is right.
bool handsAreCounted(size_t storages);

}  // namespace ebb
