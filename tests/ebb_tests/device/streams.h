// What streams are given, and who waits for whom.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "blocks.h"
#include "capture.h"
#include "queues.h"

namespace late {

inline std::map<std::string, int64_t> counts;  // of calls, by what was called
inline int64_t waits = 0;                      // that could be left out, see Settings::dropWait

inline void called(const char* what) {
  const Lock lock(program);
  ++counts[what];
  settings.callsLeft -= settings.callsLeft > 0;
  TORCH_CHECK(settings.callsLeft > 0, "late: device-side assert triggered");
}

// `task` uses memory as `uses` says. Gives its number in the stream.
inline uint64_t enqueue(int stream, const std::string& what, const Uses& uses, Task task) {
  const Lock lock(program);
  if (isCaptured(stream)) {
    addNode(stream, what, uses, std::move(task));
    return 0;
  }
  Queue& queue = queueOf(stream);
  join(queue.clock, hostClock);
  const Access access{stream, queue.given() + 1, what};
  queue.clock[stream] = access.number;
  note(uses, access, queue.clock);
  return queue.add(what, std::move(task));
}

struct Point {
  int stream;
  uint64_t number;
  Clock clock;
  uint64_t capture;                                        // 0: in none
  std::shared_ptr<std::atomic<int64_t>> passed = nullptr;  // when, in nanoseconds, if it is timed
};

inline Point endOf(int stream) {
  const Lock lock(program);
  if (isCaptured(stream)) {
    return {stream, capture->given[stream], capture->clocks[stream], capture->graph.id};
  }
  Queue& queue = queueOf(stream);
  return {stream, queue.given(), queue.clock, 0};
}

// Like endOf(), of a stream that is not captured; the stream notes when it comes there.
inline Point timedEndOf(int stream) {
  const auto passed = std::make_shared<std::atomic<int64_t>>(0);
  enqueue(stream, "time", {}, [passed] {
    passed->store(
        std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
  });
  Point point = endOf(stream);
  point.passed = passed;
  return point;
}

// The host waits.
inline void finish(const Point& point) {
  checkNotCapturing("waiting for a stream");
  TORCH_CHECK(point.capture == 0, "late: waiting for an event of a capture");
  queueOf(point.stream).finish(point.number);
  const Lock lock(program);
  join(hostClock, point.clock);
}

inline void finish(int stream) { finish(endOf(stream)); }

inline bool isDone(const Point& point) {
  checkNotCapturing("asking for an event or a stream");
  TORCH_CHECK(point.capture == 0, "late: asking for an event of a capture");
  if (!queueOf(point.stream).isDone(point.number)) {
    return false;
  }
  const Lock lock(program);
  join(hostClock, point.clock);
  return true;
}

inline std::pair<int, int> leftOut;  // who was to wait, and for which stream

inline bool isLeftOut(int who, int forWhom) {
  const bool is = waits++ == settings.dropWait;
  if (is) {
    leftOut = {who, forWhom};
  }
  return is;
}

inline void waitInCapture(int stream, const Point& point) {
  if (!capture || point.capture != capture->graph.id) {
    breakCapture(
        point.capture == 0 ? "a captured stream waits for an event from outside"
                           : "a stream waits for an event of a capture that is over");
  }
  capture->given.try_emplace(stream, 0);
  if (Clock& clock = capture->clocks[stream];
      !isBehind(clock, point.clock) && !isLeftOut(stream, point.stream)) {
    join(clock, point.clock);
  }
}

// What `stream` is given from now on comes after `point`.
inline void waitFor(int stream, const Point& point) {
  const Lock lock(program);
  if (isCaptured(stream) || point.capture != 0) {
    waitInCapture(stream, point);
    return;
  }
  Queue& queue = queueOf(stream);
  join(queue.clock, hostClock);
  if (isBehind(queue.clock, point.clock)) {
    ++counts["waits for what is before anyway"];
  } else if (isLeftOut(stream, point.stream)) {
    return;
  }
  join(queue.clock, point.clock);
  queue.clock[stream] = queue.given() + 1;
  queue.add(
      "wait", [stream = point.stream, number = point.number] { queueOf(stream).finish(number); });
}

// Runs a graph once more. It must find the memory that it found when it was captured. The device's
// generator is at `drawn`.
inline void replay(const std::shared_ptr<const Graph>& graph, int stream, Drawn drawn) {
  const Lock lock(program);
  const uint64_t id = graph->id;
  for (const auto& [address, known] : graph->blocks) {
    const Block& block = blocks.at(address);
    if (block.isFree || block.generation != known.generation) {
      tellRace("a graph uses memory that was freed", {kHost, 0, known.what}, {stream, 0, "replay"});
    }
  }
  std::map<const void*, bool> merged;
  for (const Graph::Node& node : graph->nodes) {
    for (const Use& use : node.uses) {
      if (const auto* found = blockAt(use.address);
          found != nullptr && (found->second.pool != id || !found->second.isFree)) {
        merged[reinterpret_cast<const void*>(found->first)] |= use.writes;
      }
    }
  }
  Uses uses;
  for (const auto& [address, writes] : merged) {
    uses.push_back({address, writes});
  }
  enqueue(stream, "a graph", uses, [graph, drawn] {
    drawnBefore = drawn;
    for (const Graph::Node& node : graph->nodes) {
      node.task();
    }
  });
}

}  // namespace late
