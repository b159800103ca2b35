// What many threads use at a time.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>

namespace ebb {

// Whether `round` gives true in each thread, each time.
bool allRounds(
    size_t threads, size_t rounds, const std::function<bool(size_t thread, size_t round)>& round);

// Whether objects of the arena that threads make and drop have memory of their own as long as they
// live, and begin where any object may.
bool arenaObjectsAreApart(size_t threads, size_t rounds);

// Whether no event is with two that record one on the device's current stream.
bool eventsAreApart(c10::Device device, size_t threads, size_t rounds);

}  // namespace ebb
