// Memory for the small objects that recording and offloading make.
#pragma once

#include <cstddef>

#include "ebb/export.h"

namespace ebb {

// Note [The arena]
// For each op a region makes a recipe, a value and one or two handles, and sometimes a stash.
// Backward frees these objects in about the reverse order. With so many small objects, malloc and
// free would take most of the time of recording. So the arena cuts objects one after the other from
// chunks that belong to the recording thread. A chunk counts its objects and is reused when the
// last object is freed, on any thread. A long-lived object keeps its chunk of 16 KiB allocated.
// Other objects in the chunk are still destroyed when they are freed, and release the tensors to
// which they referred.
constexpr size_t kArenaAlignment = 8;  // enough for pointers and 64-bit numbers
EBB_API void* arenaAllocate(size_t bytes);
EBB_API void arenaFree(void* object) noexcept;

// Base of classes whose objects live in the arena.
struct InArena {
  static void* operator new(size_t bytes) { return arenaAllocate(bytes); }
  static void operator delete(void* object) noexcept { arenaFree(object); }
};

// For containers whose nodes live about as long as the objects in the arena.
template <typename T>
struct ArenaAllocator {
  using value_type = T;
  ArenaAllocator() = default;
  template <typename Other>
  ArenaAllocator(const ArenaAllocator<Other>&) {}
  T* allocate(size_t count) {
    static_assert(alignof(T) <= kArenaAlignment);
    return static_cast<T*>(arenaAllocate(count * sizeof(T)));
  }
  void deallocate(T* elements, size_t) noexcept { arenaFree(elements); }
  bool operator==(const ArenaAllocator&) const = default;
};

}  // namespace ebb
