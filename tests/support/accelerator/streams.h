// A stream is a queue. What it was given runs when the host, or a stream that the host waits for,
// waits for it, and not before: what nobody ordered is too late each time.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

namespace late {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kStreams = 65;  // the default one, and others to take
inline const c10::Device kDevice(kType, 0);

inline std::recursive_mutex mutex;  // guards queues and memory; held while a task runs

struct Queue {
  std::deque<std::function<void()>> waiting;
  uint64_t given = 0;
  uint64_t done = 0;
};
inline Queue queues[kStreams];
inline thread_local int currentStream = 0;
inline int nextStream = 0;

inline uint64_t enqueue(int stream, std::function<void()> task) {
  std::lock_guard lock(mutex);
  queues[stream].waiting.push_back(std::move(task));
  return ++queues[stream].given;
}

inline void finish(int stream, uint64_t number) {
  std::lock_guard lock(mutex);
  Queue& queue = queues[stream];
  while (queue.done < number) {
    const auto task = std::move(queue.waiting.front());
    queue.waiting.pop_front();
    ++queue.done;  // also if it raises
    task();
  }
}

inline void finish(int stream) {
  std::lock_guard lock(mutex);
  finish(stream, queues[stream].given);
}

struct EventState {
  int stream;
  uint64_t number;
};

}  // namespace late
