// Streams, events and captures.
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "dry.h"

namespace dry {
namespace {

std::array<Stream, kMostDevices> defaultStreams;
unsigned long long captures = 0;
thread_local cudaStreamCaptureMode threadMode = cudaStreamCaptureModeGlobal;

// CUDA forbids some calls while another thread captures in the global mode, unless the calling
// thread has a relaxed mode. The caller holds lock().
bool isForbidden() {
  if (threadMode == cudaStreamCaptureModeRelaxed) {
    return false;
  }
  return std::any_of(streams().begin(), streams().end(), [](const auto& entry) {
    return entry.first->capture != nullptr && entry.first->globalMode;
  });
}

cudaError_t forbid(const char* call) {
  fprintf(stderr, "dry CUDA: %s during a capture\n", call);
  return failed(cudaErrorStreamCaptureUnsupported);
}

cudaError_t make(cudaStream_t* result, int priority) {
  std::lock_guard guard(lock());
  auto* made = new Stream{currentDevice(), priority};
  streams()[made] = true;
  *result = reinterpret_cast<cudaStream_t>(made);
  return cudaSuccess;
}

Event& eventOf(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

}  // namespace

std::map<Stream*, bool>& streams() {
  static auto* made = new std::map<Stream*, bool>;
  return *made;
}

Stream* streamOf(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    return nullptr;
  }
  return reinterpret_cast<Stream*>(stream);
}

Stream& clockOf(cudaStream_t stream) {
  Stream* found = streamOf(stream);
  return found != nullptr ? *found : defaultStreams[currentDevice()];
}

void append(cudaStream_t stream, double ms) {
  if (Stream* named = streamOf(stream); named != nullptr && streams().count(named) == 0) {
    fprintf(stderr, "dry CUDA: work on a stream that was destroyed\n");
    abort();
  }
  Stream& clock = clockOf(stream);
  if (clock.capture != nullptr) {
    clock.capture->nodes++;
  } else if (ms > 0) {
    clock.until = std::max(clock.until, now()) + ms;
  }
}

}  // namespace dry

using namespace dry;

DRY_API cudaError_t cudaStreamCreate(cudaStream_t* result) { return make(result, 0); }

DRY_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t* result, unsigned, int priority) {
  return make(result, priority);
}

DRY_API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  std::lock_guard guard(lock());
  streams().erase(streamOf(stream));
  delete streamOf(stream);
  return cudaSuccess;
}

DRY_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  const Stream* found = streamOf(stream);
  *priority = found != nullptr ? found->priority : 0;
  return cudaSuccess;
}

DRY_API cudaError_t cudaStreamQuery(cudaStream_t stream) {
  std::lock_guard guard(lock());
  return clockOf(stream).until > now() ? cudaErrorNotReady : cudaSuccess;
}

DRY_API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  double until;
  {
    std::lock_guard guard(lock());
    if (clockOf(stream).capture != nullptr || isForbidden()) {
      return forbid("a synchronisation");
    }
    until = clockOf(stream).until;
  }
  sleepUntil(until);
  return cudaSuccess;
}

DRY_API cudaError_t cudaDeviceSynchronize() {
  double until;
  {
    std::lock_guard guard(lock());
    if (isForbidden()) {
      return forbid("a synchronisation");
    }
    until = clockOf(nullptr).until;
    for (const auto& [stream, _] : streams()) {
      if (stream->device == currentDevice()) {
        until = std::max(until, stream->until);
      }
    }
  }
  sleepUntil(until);
  return cudaSuccess;
}

// A stream that waits for a captured event becomes a part of the capture.
DRY_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  std::lock_guard guard(lock());
  const Event& awaited = eventOf(event);
  Stream& clock = clockOf(stream);
  const Stream* from = awaited.capturedOn;
  if (from != nullptr && from->capture != nullptr && clock.capture == nullptr) {
    clock.capture = from->capture;
    clock.captureId = from->captureId;
  }
  clock.until = std::max(clock.until, awaited.at);
  return cudaSuccess;
}

DRY_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t* result, unsigned flags) {
  auto* made = new Event;
  made->isTimed = (flags & cudaEventDisableTiming) == 0;
  *result = reinterpret_cast<cudaEvent_t>(made);
  return cudaSuccess;
}

DRY_API cudaError_t cudaEventCreate(cudaEvent_t* result) {
  return cudaEventCreateWithFlags(result, 0);
}

DRY_API cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

DRY_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  std::lock_guard guard(lock());
  Stream& clock = clockOf(stream);
  eventOf(event).at = std::max(now(), clock.until);
  eventOf(event).capturedOn = clock.capture != nullptr ? &clock : nullptr;
  return cudaSuccess;
}

DRY_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

DRY_API cudaError_t cudaEventQuery(cudaEvent_t event) {
  std::lock_guard guard(lock());
  if (eventOf(event).capturedOn != nullptr || isForbidden()) {
    return forbid("a query of an event");
  }
  return eventOf(event).at > now() ? cudaErrorNotReady : cudaSuccess;
}

DRY_API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  {
    std::lock_guard guard(lock());
    if (eventOf(event).capturedOn != nullptr || isForbidden()) {
      return forbid("a wait for an event");
    }
  }
  sleepUntil(eventOf(event).at);
  return cudaSuccess;
}

DRY_API cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t begin, cudaEvent_t end) {
  if (!eventOf(begin).isTimed || !eventOf(end).isTimed) {
    return failed(cudaErrorInvalidResourceHandle);
  }
  *ms = static_cast<float>(eventOf(end).at - eventOf(begin).at);
  return cudaSuccess;
}

DRY_API cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}

DRY_API cudaError_t
cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}

DRY_API cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, threadMode);
  return cudaSuccess;
}

DRY_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  std::lock_guard guard(lock());
  Stream* found = streamOf(stream);
  if (found == nullptr || found->capture != nullptr) {
    return failed(cudaErrorStreamCaptureUnsupported);
  }
  found->capture = new Graph;
  found->captureId = ++captures;
  found->globalMode = mode == cudaStreamCaptureModeGlobal;
  return cudaSuccess;
}

DRY_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* result) {
  std::lock_guard guard(lock());
  const Stream* found = streamOf(stream);
  if (found == nullptr || found->capture == nullptr) {
    return failed(cudaErrorIllegalState);
  }
  Graph* graph = found->capture;
  for (const auto& [other, _] : streams()) {
    if (other->capture == graph) {
      other->capture = nullptr;
      other->globalMode = false;
    }
  }
  *result = reinterpret_cast<cudaGraph_t>(graph);
  return cudaSuccess;
}

DRY_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  std::lock_guard guard(lock());
  *status = clockOf(stream).capture != nullptr ? cudaStreamCaptureStatusActive
                                               : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

DRY_API cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
    cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges,
    size_t* count) {
  cudaStreamIsCapturing(stream, status);
  static cudaGraphNode_t none = nullptr;
  const Stream& found = clockOf(stream);
  const bool captures = found.capture != nullptr;
  if (id != nullptr) {
    *id = captures ? found.captureId : 0;
  }
  if (graph != nullptr) {
    *graph = reinterpret_cast<cudaGraph_t>(found.capture);
  }
  if (nodes != nullptr) {
    *nodes = &none;
  }
  if (edges != nullptr) {
    *edges = nullptr;
  }
  if (count != nullptr) {
    *count = 0;
  }
  return cudaSuccess;
}

DRY_API cudaError_t
cudaGraphInstantiateWithFlags(cudaGraphExec_t* result, cudaGraph_t graph, unsigned long long) {
  *result = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}

DRY_API cudaError_t
cudaGraphInstantiate(cudaGraphExec_t* result, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(result, graph, flags);
}

DRY_API cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }

DRY_API cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

DRY_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

DRY_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = reinterpret_cast<Graph*>(graph)->nodes;
  return cudaSuccess;
}

DRY_API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) {
  return cudaSuccess;
}

DRY_API cudaError_t
cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  *count = 0;
  return cudaSuccess;
}
