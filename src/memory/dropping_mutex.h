// A lock under which nothing dies.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "support/python_mutex.h"

namespace ebb {

// Note [Nothing dies under an engine's lock]
// The last reference to a storage may take the GIL, if Python has seen it, and whoever holds the
// GIL may wait for the engine. So what an engine lets go is collected, and dropped when its lock
// has been given back.
class DroppingMutex {
 public:
  void lock() {
    mutex_.lock();
    ++depth_;
  }
  void unlock() {
    std::vector<c10::Storage> dropped;
    if (--depth_ == 0) {
      dropped.swap(dropped_);
    }
    mutex_.unlock();
  }

  // By whoever has the lock.
  void drop(c10::Storage& storage) {
    if (storage) {
      dropped_.push_back(std::exchange(storage, c10::Storage()));
    }
  }

 private:
  PythonMutex mutex_;                  // see Note [Locks and the GIL]
  size_t depth_ = 0;                   // how often the lock is held
  std::vector<c10::Storage> dropped_;  // so far
};

}  // namespace ebb
