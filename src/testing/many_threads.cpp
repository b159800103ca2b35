#include "testing/many_threads.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "memory/arena.h"
#include "memory/bytes.h"
#include "memory/events.h"
#include "memory/stillness.h"

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
      right &= reinterpret_cast<uintptr_t>(objects.back()) % alignof(std::max_align_t) == 0;
      std::memset(objects.back(), mark, bytes);
    }
    for (size_t i = 0; i < kObjects; ++i) {
      right &= isFilledWith(objects[i], 1 + i * 17 % 1001, mark);
      arenaFree(objects[i]);
    }
    return right;
  });
}

bool eventsAreApart(c10::Device device, size_t threads, size_t rounds) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  std::mutex mutex;  // guards what follows
  std::multiset<const c10::Event*> inUse;
  return allRounds(threads, rounds, [&](size_t, size_t) {
    std::vector<std::shared_ptr<const c10::Event>> events(4);
    bool right = true;
    for (auto& event : events) {
      event = recordEvent(stream);
      std::lock_guard<std::mutex> lock(mutex);
      inUse.insert(event.get());
      right &= inUse.count(event.get()) == 1;
    }
    std::lock_guard<std::mutex> lock(mutex);
    for (auto& event : events) {
      inUse.erase(inUse.find(event.get()));
    }
    return right;
  });
}

bool handsAreKnown(size_t threads, size_t rounds) {
  constexpr uint64_t kClosed = 5;
  return allRounds(threads, rounds, [&](size_t, size_t) {
    const Stillness still;
    const c10::Storage free = allocate(8, c10::kCPU);
    const c10::Storage inHand = allocate(8, c10::kCPU);
    noteHandOn(inHand, kClosed);
    const bool freeMayBeRead = ReadAhead({free}, kClosed).isAllowed();
    const bool inHandMayBeRead = ReadAhead({free, inHand}, kClosed).isAllowed();
    const bool laterMayBeRead = ReadAhead({inHand}, kClosed + 1).isAllowed();
    return still.holds() && freeMayBeRead && !inHandMayBeRead && laterMayBeRead &&
           weakReferencesTo(inHand) == 0;
  });
}

}  // namespace ebb
