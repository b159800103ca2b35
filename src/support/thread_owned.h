// What each thread has of its own, on the heap.
#pragma once

#include <cxxabi.h>

#include <utility>

// The library's, as the C++ ABI names it: it stays loaded until what it registered has run.
[[gnu::visibility("hidden")]] extern void* __dso_handle;

namespace ebb {

// Note [Static TLS]
// Initial-exec thread_locals are found without a call, which each op needs; but a library that is
// loaded late gets all its thread_locals from what the process has left of static TLS then: some
// 1,500 bytes after `import torch`, of which libgomp (scikit-learn, xgboost, faiss) wants a part
// as well. So a thread_local of libebb is a pointer to something on the heap, or a number, and no
// object that needs a guard. They are under 64 bytes together, which a test adds up.
// What they point to ends with the thread, while others that end then may still dispatch: a
// pointer is null before its object goes, and whoever comes later gets a new one, which ends too.

// Calls `end(argument)` when this thread ends, also if it is ending already.
inline void atThreadExit(void (*end)(void*), void* argument) {
  abi::__cxa_thread_atexit(end, argument, &__dso_handle);
}

template <class T>
[[gnu::noinline]] void makeThreadOwned(T*& own) {
  own = new T;
  atThreadExit([](void* place) { delete std::exchange(*static_cast<T**>(place), nullptr); }, &own);
}

// What `own`, a thread_local, points to.
template <class T>
T& threadOwned(T*& own) {
  if (own == nullptr) [[unlikely]] {
    makeThreadOwned(own);
  }
  return *own;
}

}  // namespace ebb
