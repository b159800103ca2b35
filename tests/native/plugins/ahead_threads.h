// What many threads know of replays ahead.
#pragma once

#include <cstddef>

namespace ebb {

// Whether replays ahead may read what nobody has a hand on, and nothing else, whoever asks
// meanwhile.
bool handsAreKnown(size_t threads, size_t rounds);

// Whether a thread that replays ahead is known as such so many times, while others begin and end.
// Does not return if it is not.
bool stillThreadsAreKnown(size_t rounds);

// Whether references to a storage that somebody has a hand on are counted, while somebody has hands
// on so many others.
bool handsAreCounted(size_t storages);

}  // namespace ebb
