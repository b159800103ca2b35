// What many threads use at a time.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace ebb {

// Whether objects of the arena that threads make and drop have memory of their own as long as they
// live, and begin where any object may.
bool arenaObjectsAreApart(size_t threads, size_t rounds);

// Whether no event is with two that record one on the device's current stream.
bool eventsAreApart(c10::Device device, size_t threads, size_t rounds);

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
