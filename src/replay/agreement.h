// The ranks of a process group compare the collectives that their replays repeat.
#pragma once

#include <string>

namespace ebb {

// See Note [Repeated collectives]. `collectives`: the list in words. `always`: also compares a list
// that the ranks have compared before. Throws if a rank repeats others.
void agreeOnCollectives(
    const std::string& group,
    const std::string& region,
    const std::string& collectives,
    bool always);

}  // namespace ebb
