// A lock under which no storage is freed.
#pragma once

#include <c10/core/Storage.h>

#include <algorithm>
#include <iterator>
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
  void lock() { mutex_.lock(); }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() {
    std::vector<c10::Storage> dropped;
    if (mutex_.depth() == 1) {
      dropped.swap(dropped_);
    }
    mutex_.unlock();
  }

  // Like unlock(), but drops only the collected storages for which `may` is true, and those even if
  // the thread still holds the lock. The next unlock() drops the others.
  template <class May>
  void unlockAndDropOnly(const May& may) {
    std::vector<c10::Storage> dropped;
    std::copy_if(dropped_.begin(), dropped_.end(), std::back_inserter(dropped), may);
    std::erase_if(dropped_, may);
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
  std::vector<c10::Storage> dropped_;  // collected so far
};

}  // namespace ebb
