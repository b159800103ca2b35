// Locks under which Python may run.
#pragma once

#include <cstddef>
#include <mutex>

#include "support/python_support.h"

namespace ebb {

// Note [Locks and the GIL]
// A thread that holds one of these locks may need the GIL: a replay runs operators written in
// Python, a failed allocation notifies Python observers, warnings go through Python, and dropping
// the last reference to a tensor may drop its Python object. A thread that waits for the lock while
// holding the GIL would deadlock with the owner. So PythonMutex tries the lock first, and releases
// the GIL while waiting. The mutex does so by itself, since destructors run by Python take the lock
// too, outside of any binding.
//
// The order of all locks, in which a thread may take one while it holds others:
//   1. Graph::mutex                          see Note [One lock per graph]
//   2. the lock of draws, in random_state.cpp   not held while a custom operator runs
//   3. the lock of the offload engines, the lock of the paging engine; never both at once
//   4. all other mutexes, which guard a few members each; code that holds one calls nothing that
//      could take another lock or the GIL.
// Locks 1 and 2 are PythonMutexes, and each lock 3 is a DroppingMutex on one. PythonMutex is
// recursive: a thread may drop the last reference to a guarded object under the lock, and the
// object's destructor may take the lock again.
class PythonMutex {
 public:
  void lock() {
    if (!mutex_.try_lock()) {
      const WithoutGil withoutGil;
      mutex_.lock();
    }
    ++depth_;
  }
  bool try_lock() {
    const bool isLocked = mutex_.try_lock();
    depth_ += isLocked ? 1 : 0;
    return isLocked;
  }
  void unlock() {
    --depth_;
    mutex_.unlock();
  }

  // How many times the calling thread holds the lock. Called with the lock held.
  size_t depth() const { return depth_; }

 private:
  std::recursive_mutex mutex_;
  size_t depth_ = 0;
};

}  // namespace ebb
