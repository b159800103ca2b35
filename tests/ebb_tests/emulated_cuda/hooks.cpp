// The functions that code compiled with -fsanitize=thread calls, by GCC and by clang.
#include "hooks.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#define EBB_ACCESS(name, bytes, alignment)                \
  void __tsan_##name##read##bytes(const void* address) {  \
    emulated::accessed(address, bytes, alignment, false); \
  }                                                       \
  void __tsan_##name##write##bytes(const void* address) { \
    emulated::accessed(address, bytes, alignment, true);  \
  }

extern "C" {
EBB_ACCESS(, 1, 1)
EBB_ACCESS(, 2, 2)
EBB_ACCESS(, 4, 4)
EBB_ACCESS(, 8, 8)
EBB_ACCESS(, 16, 16)

// Where the compiler knows of no alignment: it merged accesses of the source.
EBB_ACCESS(unaligned_, 2, 1)
EBB_ACCESS(unaligned_, 4, 1)
EBB_ACCESS(unaligned_, 8, 1)
EBB_ACCESS(unaligned_, 16, 1)

void __tsan_read_range(const void* address, size_t bytes) {
  emulated::accessed(address, bytes, 1, false);
}

void __tsan_write_range(const void* address, size_t bytes) {
  emulated::accessed(address, bytes, 1, true);
}

// Of clang, which has no ranges.
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  __tsan_read_range(from, bytes);
  __tsan_write_range(to, bytes);
  return std::memcpy(to, from, bytes);
}

void* __tsan_memset(void* to, int value, size_t bytes) {
  __tsan_write_range(to, bytes);
  return std::memset(to, value, bytes);
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

// Of the host's code beside kernels: whether a static variable is there.
uint8_t __tsan_atomic8_load(const volatile uint8_t* address, int) { return *address; }
}
