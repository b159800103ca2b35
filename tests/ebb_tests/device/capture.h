// Graphs: what streams are given while they are captured runs when the graph is replayed.
//
// Rules are CUDA's: while a capture goes on nobody may wait for the device or ask it; a stream that
// is captured waits for no event from outside, and nobody outside for an event of a capture; a
// stream takes part by waiting for an event of the capture; and at the end all that take part have
// come back to the first.
// Source: "Creating a Graph Using Stream Capture", CUDA C++ Programming Guide.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "blocks.h"
#include "queues.h"

namespace late {

struct Graph {
  struct Node {
    Task task;
    Uses uses;
  };
  struct Known {
    uint64_t generation;
    std::string what;  // used it first
  };
  uint64_t id = 0;
  int device = 0;
  std::vector<Node> nodes;
  std::map<uintptr_t, Known> blocks;  // that it uses and that are not its own
  uint64_t draws = 0;                 // numbers of the device's generator that it takes
};

struct Capture {
  Graph graph;
  int first;                               // the stream that is captured
  std::map<int, uint64_t> given;           // tasks by stream, of those that take part
  std::map<int, Clock> clocks;             // of those
  std::map<uintptr_t, Accesses> accesses;  // by block
  std::string broken;                      // why it cannot go on; empty if it can
};

// One at a time. Guarded by `program`.
inline std::optional<Capture> capture;
inline uint64_t captures = 0;  // so far
inline std::map<uint64_t, std::shared_ptr<Graph>> graphs;

// Where the device's generator was when the graph began that runs on this stream.
struct Drawn {
  uint64_t seed;
  uint64_t place;
};
inline thread_local Drawn drawnBefore{};

inline bool isCaptured(int stream) { return capture && capture->given.count(stream) > 0; }

[[noreturn]] inline void breakCapture(const std::string& why) {
  if (capture && capture->broken.empty()) {
    capture->broken = why;
  }
  TORCH_CHECK(false, "late: ", why);
}

// As cudaThreadExchangeStreamCaptureMode: a capture forbids a relaxed thread nothing.
constexpr int kRelaxed = 2;
inline thread_local int captureMode = 0;

// What the host may not do while a graph is captured.
inline void checkNotCapturing(const char* what) {
  const Lock lock(program);
  if (capture && captureMode != kRelaxed) {
    breakCapture(std::string(what) + " is not permitted while a graph is captured");
  }
}

inline void addNode(int stream, const std::string& what, const Uses& uses, Task task) {
  Clock& clock = capture->clocks[stream];
  const uint64_t number = ++capture->given[stream];
  clock[stream] = number;
  for (const Use& use : uses) {
    if (auto* found = blockAt(use.address)) {
      auto& [address, block] = *found;
      capture->accesses[address].add({stream, number, what}, use.writes, clock);
      if (block.pool != capture->graph.id) {
        capture->graph.blocks.try_emplace(address, Graph::Known{block.generation, what});
      }
    }
  }
  capture->graph.nodes.push_back({std::move(task), uses});
}

inline void beginCapture(int stream) {
  const Lock lock(program);
  TORCH_CHECK(!capture, "late: a graph is being captured");
  TORCH_CHECK(stream % kStreamsEach != 0, "late: the default stream cannot be captured");
  capture.emplace();
  capture->graph.id = ++captures;
  capture->graph.device = stream / kStreamsEach;
  capture->first = stream;
  capture->given[stream] = 0;
  capture->clocks[stream] = {};
}

inline uint64_t endCapture(int stream) {
  const Lock lock(program);
  TORCH_CHECK(capture && capture->first == stream, "late: this stream is not being captured");
  Capture done = std::move(*capture);
  capture.reset();
  TORCH_CHECK(done.broken.empty(), "late: the capture was invalidated: ", done.broken);
  for (const auto& [other, number] : done.given) {
    TORCH_CHECK(
        done.clocks[stream][other] >= number, "late: stream ", other % kStreamsEach,
        " has work that the captured stream did not wait for");
  }
  graphs[done.graph.id] = std::make_shared<Graph>(std::move(done.graph));
  return done.graph.id;
}

}  // namespace late
