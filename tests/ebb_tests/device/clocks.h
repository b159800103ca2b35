// Who is known to come after whom, whatever the timing was.
//
// Every stream has a clock: how far into each stream's work its own next task is known to come
// after. Events carry clocks, waits join them. The host has one clock for all of its threads: what
// one thread has waited for counts as known to all, so an order that only threads lack is not seen.
// Sources: Lamport, "Time, Clocks, and the Ordering of Events in a Distributed System", 1978;
// Mattern, "Virtual Time and Global States of Distributed Systems", 1988.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace late {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr int kStreamsEach = 33;  // the default one, and others to take
constexpr int kStreams = kDevices * kStreamsEach;
constexpr int kHost = -1;  // instead of a stream

// The order of the program. Never held while somebody waits for a stream.
inline std::recursive_mutex program;
using Lock = std::lock_guard<std::recursive_mutex>;

using Clock = std::array<uint64_t, kStreams>;

inline void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) {
    into[i] = std::max(into[i], other[i]);
  }
}

inline bool isBehind(const Clock& clock, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) {
    if (clock[i] < other[i]) {
      return false;
    }
  }
  return true;
}

inline Clock hostClock{};

struct Access {
  int stream = kHost;
  uint64_t number = 0;  // there
  std::string what;

  bool isBefore(const Clock& clock) const { return stream == kHost || clock[stream] >= number; }
};

inline std::vector<std::string> races;

inline void tellRace(const char* kind, const Access& first, const Access& second) {
  constexpr size_t kMost = 100;
  if (races.size() < kMost) {
    const auto name = [](const Access& access) {
      return access.what +
             (access.stream == kHost
                  ? " (host)"
                  : " (device " + std::to_string(access.stream / kStreamsEach) + ", stream " +
                        std::to_string(access.stream % kStreamsEach) + ")");
    };
    races.push_back(std::string(kind) + ": " + name(first) + ", then " + name(second));
  }
}

// Of one piece of memory: the last write, and what has read it since.
class Accesses {
 public:
  // `clock`: what `access` is known to come after.
  void add(const Access& access, bool writes, const Clock& clock) {
    if (!wrote_.isBefore(clock)) {
      tellRace(writes ? "write and write" : "write and read", wrote_, access);
    }
    if (!writes) {
      addRead(access);
      return;
    }
    for (const Access& read : reads_) {
      if (!read.isBefore(clock)) {
        tellRace("read and write", read, access);
      }
    }
    wrote_ = access;
    reads_.clear();
  }

 private:
  void addRead(const Access& access) {
    for (Access& read : reads_) {
      if (read.stream == access.stream) {
        read = access;
        return;
      }
    }
    reads_.push_back(access);
  }

  Access wrote_;
  std::vector<Access> reads_;  // one for each stream
};

inline c10::Device deviceOf(int stream) {
  return c10::Device(kType, static_cast<c10::DeviceIndex>(stream / kStreamsEach));
}

inline int indexOf(const c10::Stream& stream) {
  return stream.device_index() * kStreamsEach + static_cast<int>(stream.id());
}

inline c10::Stream streamOf(int index) {
  return c10::Stream(c10::Stream::UNSAFE, deviceOf(index), index % kStreamsEach);
}

inline thread_local int currentDevice = 0;
inline thread_local std::array<int, kDevices> currentOf{0, kStreamsEach};  // streams, by device

inline int resolved(c10::Device device) {
  return device.has_index() ? device.index() : currentDevice;
}

inline int currentStream() { return currentOf[currentDevice]; }

}  // namespace late
