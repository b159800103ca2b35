// Memory for the small objects that recording and offloading make.
#pragma once

#include <cstddef>

#include "ebb/export.h"

namespace ebb {

// Note [The arena]
// A region makes a recipe, a value and a handle or two for each op, or a stash, and backward drops
// them in about the reverse order: at that rate malloc and free would be the larger part of the
// work, and the more so the more there are. So they are cut one after the other from chunks that
// belong to the recording thread. A chunk counts the objects in it and is used again when the last
// one is gone, on whatever thread that happens. An object that lives long keeps its chunk of 16 KiB
// and nothing else: what its neighbours referred to was given up when they died.
EBB_API void* arenaAllocate(size_t bytes);
EBB_API void arenaFree(void* object) noexcept;

// Base of classes whose objects live there.
struct InArena {
  static void* operator new(size_t bytes) {
    return arenaAllocate(bytes);
  }
  static void operator delete(void* object) noexcept {
    arenaFree(object);
  }
};

// For containers whose nodes come and go like those objects.
template <typename T>
struct ArenaAllocator {
  using value_type = T;
  ArenaAllocator() = default;
  template <typename Other>
  ArenaAllocator(const ArenaAllocator<Other>&) {
  }
  T* allocate(size_t count) {
    return static_cast<T*>(arenaAllocate(count * sizeof(T)));
  }
  void deallocate(T* elements, size_t) noexcept {
    arenaFree(elements);
  }
  bool operator==(const ArenaAllocator&) const = default;
};

}  // namespace ebb
