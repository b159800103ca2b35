// What the compiler calls before an access of a kernel: see Note [Emulated kernels].
#pragma once

#include <cstddef>

namespace emulated {

void accessed(const void* address, size_t bytes, size_t alignment, bool writes);

}  // namespace emulated
