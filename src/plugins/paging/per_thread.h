// A value for each thread, in code that runs too seldom to take static TLS.
#pragma once

#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "support/thread_owned.h"

namespace ebb {

// See Note [Static TLS]. An object of this class must live as long as the process. A thread's value
// is forgotten when the thread ends, because a later thread may get the same id.
template <class T>
class PerThread {
 public:
  // The value of this thread; T() if the thread has set none.
  T get() {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = values_.find(std::this_thread::get_id());
    return found == values_.end() ? T() : found->second;
  }

  // Sets the value of this thread, and returns the value before.
  T exchange(T value) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto [entry, isNew] = values_.try_emplace(std::this_thread::get_id());
    if (isNew) {
      atThreadExit([](void* all) { static_cast<PerThread*>(all)->forget(); }, this);
    }
    return std::exchange(entry->second, std::move(value));
  }

 private:
  void forget() {
    std::lock_guard<std::mutex> lock(mutex_);
    values_.erase(std::this_thread::get_id());
  }

  std::mutex mutex_;  // guards values_
  std::unordered_map<std::thread::id, T> values_;
};

}  // namespace ebb
