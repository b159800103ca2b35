#include "many_threads.h"

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "memory/arena.h"
#include "memory/stillness.h"
#include "stream/event.h"
#include "stream/stream.h"

namespace ebb {
namespace {

// Whether `round` gives true in each thread, each time.
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

bool isFilledWith(const char* bytes, size_t count, char what) {
  return std::all_of(bytes, bytes + count, [&](char byte) { return byte == what; });
}

c10::Storage someBytes() {
  constexpr size_t kBytes = 8;
  return {c10::Storage::use_byte_size_t(), kBytes, c10::GetAllocator(c10::kCPU), true};
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

bool handsAreKnown(size_t threads, size_t rounds) {
  constexpr uint64_t kClosed = 5;
  return allRounds(threads, rounds, [&](size_t, size_t) {
    const Stillness still;
    const c10::Storage free = someBytes();
    const c10::Storage inHand = someBytes();
    noteHandOn(inHand, kClosed);
    const bool freeMayBeRead = ReadAhead({free}, kClosed).isAllowed();
    const bool inHandMayBeRead = ReadAhead({free, inHand}, kClosed).isAllowed();
    const bool laterMayBeRead = ReadAhead({inHand}, kClosed + 1).isAllowed();
    return still.holds() && freeMayBeRead && !inHandMayBeRead && laterMayBeRead &&
           weakReferencesTo(inHand) == 1;
  });
}

bool stillThreadsAreKnown(size_t rounds) {
  std::atomic<bool> isOver{false};
  std::thread others([&] {
    while (!isOver) {
      const std::array<Stillness, 64> begun{};
    }
  });
  for (size_t i = 0; i < rounds; ++i) {
    const Stillness still;
    if (still.holds()) {
      const Commotion ofItsOwn;
    }
  }
  isOver = true;
  others.join();
  return true;
}

bool handsAreCounted(size_t storages) {
  const c10::Storage inHand = someBytes();
  noteHandOn(inHand, 1);
  std::atomic<bool> isOver{false};
  std::thread other([&] {
    std::vector<c10::Storage> more(storages);
    for (c10::Storage& storage : more) {
      storage = someBytes();
      noteHandOn(storage, 1);
    }
    isOver = true;
  });
  bool right = true;
  while (!isOver) {
    right &= weakReferencesTo(inHand) == 1;
  }
  other.join();
  return right;
}

}  // namespace ebb
