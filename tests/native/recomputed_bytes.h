// The example of docs/design/plugins.md: an observer that counts recomputed bytes.
#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace ebb {

// From now on ebb counts (`on`), or does not count, the bytes that new regions recompute.
void countRecomputedBytes(bool on);

// The bytes recomputed so far, by the module that made them.
std::map<std::string, size_t> recomputedBytes();

}  // namespace ebb
