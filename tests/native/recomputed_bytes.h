// The example of docs/design/plugins.md: an observer that counts recomputed bytes.
#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace ebb {

// Whether regions opened from now on are observed.
void countRecomputedBytes(bool on);

// The bytes recomputed so far, by the module that made them.
std::map<std::string, size_t> recomputedBytes();

}  // namespace ebb
