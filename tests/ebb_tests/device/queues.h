// A stream is a queue with a thread of its own.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "clocks.h"
#include "settings.h"

namespace late {

using Task = std::function<void()>;

inline std::vector<std::string> errors;  // that tasks raised

class Queue {
 public:
  explicit Queue(int index) : random_(index + 1), isDefault_(index % kStreamsEach == 0) {
    std::thread([this] { work(); }).detach();
  }

  uint64_t add(std::string what, Task task) {
    uint64_t number = 0;
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back({std::move(what), std::move(task)});
      number = ++given_;
    }
    changed_.notify_all();
    return number;
  }

  // Waits until so many tasks are done.
  void finish(uint64_t number) {
    std::unique_lock lock(mutex_);
    released_ = std::max(released_, number);
    changed_.notify_all();
    changed_.wait(lock, [&] { return done_ >= number; });
  }

  bool isDone(uint64_t number) {
    const std::lock_guard lock(mutex_);
    return done_ >= number;
  }

  uint64_t given() {
    const std::lock_guard lock(mutex_);
    return given_;
  }

  Clock clock{};  // of its last task; guarded by `program`

 private:
  struct Given {
    std::string what;
    Task task;
  };

  [[noreturn]] void work() {
    at::set_num_threads(1);
    for (;;) {
      const Given given = next();
      delay();
      try {
        given.task();
      } catch (const c10::Error& error) {
        const Lock lock(program);
        errors.push_back(given.what + ": " + error.what_without_backtrace());
      } catch (const std::exception& error) {
        const Lock lock(program);
        errors.push_back(given.what + ": " + error.what());
      }
      {
        const std::lock_guard lock(mutex_);
        ++done_;
      }
      changed_.notify_all();
    }
  }

  Given next() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !waiting_.empty() && (!settings.lazy || done_ < released_); });
    Given given = std::move(waiting_.front());
    waiting_.pop_front();
    return given;
  }

  void delay() {
    const int64_t most = isDefault_ ? settings.computeUs : settings.sideUs;
    if (!settings.lazy && most > 0) {
      std::this_thread::sleep_for(
          std::chrono::microseconds(static_cast<int64_t>(random_()) % most));
    }
  }

  std::mutex mutex_;  // guards all that follows
  std::condition_variable changed_;
  std::deque<Given> waiting_;
  uint64_t given_ = 0;
  uint64_t done_ = 0;
  uint64_t released_ = 0;  // somebody waits for so many; what may run if streams are lazy
  std::minstd_rand random_;
  const bool isDefault_;
};

// Started when it is first used; never ended.
inline Queue& queueOf(int stream) {
  static auto* queues = new std::array<Queue*, kStreams>{};
  const Lock lock(program);
  Queue*& queue = (*queues)[stream];
  if (queue == nullptr) {
    queue = new Queue(stream);
  }
  return *queue;
}

}  // namespace late
