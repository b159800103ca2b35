// Per-thread objects on the heap.
#pragma once

#include <cxxabi.h>

#include <utility>

// The library's handle in the C++ ABI: the library stays loaded until its registered functions have
// run.
[[gnu::visibility("hidden")]] extern void* __dso_handle;

namespace ebb {

// Note [Static TLS]
// ebb reads thread_locals for each op, so they are initial-exec: reading them needs no call. But a
// library loaded late gets all such thread_locals from the static TLS that the process has left:
// some 1,500 bytes after `import torch`. libgomp (scikit-learn, xgboost, faiss) needs some of it.
// So a thread_local of libebb is a pointer to a heap object, or a number, and never an object that
// needs a guard. All thread_locals together take under 64 bytes; a test adds up the sizes. The heap
// objects are deleted when the thread ends. Destructors of other objects may still call operators
// after that. So the pointer becomes null before its object is deleted; a later use creates a new
// object, which is deleted in turn.

// Calls `end(argument)` when this thread ends, even if the thread is ending already.
inline void atThreadExit(void (*end)(void*), void* argument) {
  abi::__cxa_thread_atexit(end, argument, &__dso_handle);
}

template <class T>
[[gnu::noinline]] void makeThreadOwned(T*& own) {
  own = new T;
  atThreadExit([](void* place) { delete std::exchange(*static_cast<T**>(place), nullptr); }, &own);
}

// The object of the thread_local pointer `own`, created at first use.
template <class T>
T& threadOwned(T*& own) {
  if (own == nullptr) [[unlikely]] {
    makeThreadOwned(own);
  }
  return *own;
}

}  // namespace ebb
