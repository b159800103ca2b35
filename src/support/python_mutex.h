// Locks under which Python may run.
#pragma once

#include <mutex>

#include "support/python_support.h"

namespace ebb {

// Note [Locks and the GIL]
// Whoever holds one of these locks may come to need the GIL: a replay runs operators written in
// Python, an allocation that fails tells Python's observers, a warning is Python's, and the last
// reference to a tensor takes its Python object with it. If somebody with the GIL waited for the
// lock meanwhile, both would wait for ever. So whoever has the GIL tries, and if the lock is not
// free gives the GIL up while it waits. The lock does that by itself, since destructors that Python
// runs take it too, where no binding could.
//
// The order of all locks, in which a thread may take one while it holds others:
//   1. Graph::mutex                          see Note [One lock per graph]
//   2. the lock of draws, in random_state.cpp   not while an operator from elsewhere runs
//   3. the lock of the offload engines, that of the paging engine; neither under the other
//   4. all other mutexes, which guard a few members each: while one is held nothing is called that
//      could take another lock or the GIL.
// 1 is of this type, and 3 is a DroppingMutex on one. It is recursive: the last reference to what
// it guards may go under it.
class PythonMutex {
 public:
  void lock() {
    if (!mutex_.try_lock()) {
      const WithoutGil withoutGil;
      mutex_.lock();
    }
  }
  bool try_lock() {
    return mutex_.try_lock();
  }
  void unlock() {
    mutex_.unlock();
  }

 private:
  std::recursive_mutex mutex_;
};

}  // namespace ebb
