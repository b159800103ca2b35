// A policy for tests of what an exception leaves behind.
#pragma once

#include <cstdint>

#include "ebb/policy.h"

namespace ebb {

// Recomputes everything, and throws before a region's `at`-th op (from 1) runs. Each region counts
// for itself; views are not counted.
PolicyPtr failingPolicy(uint32_t at);

}  // namespace ebb
