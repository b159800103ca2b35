// A lock under which no storage is freed.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "support/python_mutex.h"

namespace ebb {

// Note [Nothing dies under an engine's lock]
// If Python has seen a storage, dropping its last reference may take the GIL, and the thread that
// holds the GIL may wait for the engine. So an engine collects the storages that it releases, and
// drops them after unlocking.
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

  // Collects `storage`. Called with the lock held.
  void drop(c10::Storage& storage) {
    if (storage) {
      dropped_.push_back(std::exchange(storage, c10::Storage()));
    }
  }

 private:
  PythonMutex mutex_;                  // see Note [Locks and the GIL]
  size_t depth_ = 0;                   // number of times that the lock is held
  std::vector<c10::Storage> dropped_;  // collected so far
};

}  // namespace ebb
