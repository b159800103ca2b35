#include "many_threads.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "memory/arena.h"
#include "stream/event.h"
#include "stream/stream.h"

namespace ebb {

bool allRounds(
    size_t threads, size_t rounds, const std::function<bool(size_t thread, size_t round)>& round) {
  std::atomic<bool> right{true};
  std::vector<std::thread> running;
  for (size_t thread = 0; thread < threads; ++thread) {
    running.emplace_back([&, thread] {
      for (size_t i = 0; i < rounds && right; ++i) {
        if (!round(thread, i)) {
          right = false;
        }
      }
    });
  }
  for (std::thread& thread : running) {
    thread.join();
  }
  return right;
}

namespace {

bool isFilledWith(const char* bytes, size_t count, char what) {
  return bytes[0] == what && std::memcmp(bytes, bytes + 1, count - 1) == 0;
}

}  // namespace

bool arenaObjectsAreApart(size_t threads, size_t rounds) {
  constexpr size_t kObjects = 48;  // more than a chunk's worth
  return allRounds(threads, rounds, [](size_t thread, size_t round) {
    const auto mark = static_cast<char>(thread * 31 + round);
    std::vector<char*> objects;
    bool right = true;
    for (size_t i = 0; i < kObjects; ++i) {
      const size_t bytes = 1 + i * 17 % 1001;
      objects.push_back(static_cast<char*>(arenaAllocate(bytes)));
      right &= reinterpret_cast<uintptr_t>(objects.back()) % kArenaAlignment == 0;
      std::memset(objects.back(), mark, bytes);
    }
    for (size_t i = 0; i < kObjects; ++i) {
      right &= isFilledWith(objects[i], 1 + i * 17 % 1001, mark);
      arenaFree(objects[i]);
    }
    return right;
  });
}

// Threads meet nowhere else, so that they come at a time. What each has at the end it keeps.
bool eventsAreApart(c10::Device device, size_t threads, size_t rounds) {
  using Events = std::vector<EventPtr>;
  const c10::Stream stream = currentStream(device);
  std::vector<Events> last(threads);
  const bool areThere = allRounds(threads, rounds, [&](size_t thread, size_t) {
    Events& events = last[thread];
    events.assign(4, nullptr);
    for (auto& event : events) {
      event = recordEvent(stream);
    }
    return std::all_of(events.begin(), events.end(), [](const auto& event) { return event; });
  });
  std::set<const Event*> all;
  for (const Events& events : last) {
    for (const auto& event : events) {
      all.insert(event.get());
    }
  }
  return areThere && all.size() == 4 * threads;
}

}  // namespace ebb
