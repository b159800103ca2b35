// The door for a plug-in that runs kernels beside the program. The core tells the plug-in before
// state changes that the whole process shares.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>

#include "ebb/export.h"

namespace ebb {

// The functions of the plug-in. Any thread may call them.
struct ProcessStateFollower {
  // See beginProcessStateChange() and endProcessStateChange().
  void (*changeBegins)() = nullptr;
  void (*changeEnds)() = nullptr;
  // See beforeUnseenResize().
  void (*willResize)(const c10::Storage& storage) = nullptr;
  // Returns `count(storage)` without the weak references that the plug-in itself holds.
  size_t (*countWithoutOwn)(
      const c10::Storage& storage, size_t (*count)(const c10::Storage& storage)) = nullptr;
};

// Registers the plug-in that follows the process's state; there is at most one. Returns true, so
// that the plug-in can call it when the library is loaded.
bool followProcessState(const ProcessStateFollower& follower);

// Note [Changes of the process's state]
// Three kinds of code change state that a kernel on another thread may read: the setters of torch's
// settings, a replay under settings other than the process's, and code that resizes a storage or
// gives it other memory. Such code calls the first function before the change, and the second
// function afterwards. Between the two calls the plug-in runs no kernel. The first call waits,
// without the GIL, for the kernels that the plug-in runs. Changes do not exclude each other.
EBB_API void beginProcessStateChange();
EBB_API void endProcessStateChange();

// The process's state changes while the object lives.
struct ProcessStateChange {
  ProcessStateChange() { beginProcessStateChange(); }
  ~ProcessStateChange() { endProcessStateChange(); }
  ProcessStateChange(const ProcessStateChange&) = delete;
  ProcessStateChange& operator=(const ProcessStateChange&) = delete;
};

// The program is about to resize `storage` or to replace its memory, and no operator shows this.
EBB_API void beforeUnseenResize(const c10::Storage& storage);

// Returns the number of weak references to `storage` without those of the plug-in. `count` counts
// all weak references.
EBB_API size_t
weakReferencesOfOthers(const c10::Storage& storage, size_t (*count)(const c10::Storage& storage));

}  // namespace ebb
