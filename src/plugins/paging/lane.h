// The stream that moves pages, beside the compute streams.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "stores/capture_watch.h"
#include "stores/dropping_mutex.h"
#include "stream/event.h"

namespace ebb {

// Note [The lane]
// A call is one operation on a pool: moving rows, giving pages back, reading errors. All calls on a
// device's pools run one after the other on one stream of ebb's, the lane. The memory of pools and
// tickets is allocated on the lane, so calls that use no other memory need not wait, and the memory
// can be freed at any time. A call that uses a tensor runs after all work given to the current
// compute stream. That stream waits for the calls whose results it needs; no other stream waits.
// The tensor is held until the compute stream has waited for the call: later work on that stream
// may then reuse the memory. A wait releases only tensors held for the waiting stream, so freeing
// one stream's memory never depends on another stream. When a step is over, the current compute
// stream waits for all remaining calls, and ebb records that stream with the allocator (noteUse).
// ebb also calls noteUse when a stream reads memory that another stream allocated. With a single
// compute stream, noteUse has no effect. On the CPU there is no lane: calls are done when they
// return.
//
// Note [Pages in a CUDA graph]
// All calls can be captured. A captured stream may not wait for an event from outside of the
// capture, and another stream may not wait for an event recorded in it. So each call knows its
// capture, and no stream waits for a call of another capture. Calls given before a capture are over
// when the graph is launched (torch.cuda.graph waits for the device first); calls given in a
// capture have not run yet. Memory held for a captured call is released when the capture is over,
// successful or not. Before a capture ends, the compute stream must have waited for the lane's last
// call; it has done so once every stash is restored. Captured calls run when the graph is launched,
// and not on the lane. So if a graph uses a pool, all calls of the pool run after all work given to
// the compute stream, and the compute stream waits for every call, including those that release
// pages at the end of a step. Rows come back only in the capture in which they were stashed, or
// outside of captures if they were stashed there. If a tensor that was stashed outside is dropped
// during a capture, the next call outside gives the pages back. Launches of a graph do not give
// back pages that are dropped after the capture. So a captured backward must be complete, or
// autograd's graph must be dropped before the capture ends. A pool that a failed capture has used
// counts as a graph's pool from then on. Two captures at a time would share the lane, which is
// impossible.
class PageLane {
 public:
  // A call, or the end of several calls.
  struct Call {
    uint64_t number = 0;   // 0: nothing to wait for
    uint64_t capture = 0;  // capture of the call; 0: none
    EventPtr end{};        // null on the CPU
  };

  // `drops` is the lock under which all methods are called.
  PageLane(c10::Device device, DroppingMutex& drops);

  // Runs a call that uses tensors of the compute stream; `held` lives until that stream has waited
  // for the call.
  Call run(const std::function<void()>& work, std::vector<c10::Storage> held);

  // Runs a call that nothing waits for individually; with `afterCompute`, after all work given to
  // the compute stream so far.
  void give(const std::function<void()>& work, bool afterCompute = false);

  // The end of all calls so far. In a capture that the lane has not joined, returns a call with
  // number 0.
  Call mark();

  // Keeps `bytes`, allocated on the stream `made`, until `made` has waited for `call`, another
  // stream has waited for all calls, or the host knows that the call is over.
  void hold(const Call& call, c10::Stream made, c10::Storage& bytes);

  // The compute stream waits for `call`.
  void wait(const Call& call);

  // The compute stream waits for the latest call given from that stream.
  void join();

  // If the lane holds memory for calls of the current capture, the compute stream waits for all
  // calls, and the lane releases that memory. With `always`, the stream waits in any case.
  void joinAll(bool always);

  // The host waits for all calls, unless all are known to be over.
  void finish();

  // The host has waited for `call`.
  void noteOver(const Call& call);

  // The capture that the compute stream takes part in; 0: none.
  uint64_t capture();

  bool isBesideCompute() const { return stream_.has_value(); }

 private:
  // Memory that must live until a call is over. A call is over once any later call is over. The
  // calls' captures need no comparison: a held call belongs to the current capture, or was over
  // when that capture began.
  struct Held {
    Call until;
    c10::Stream stream;  // stream that owns the memory, as far as known
    std::vector<c10::Storage> storages;
  };

  void release(const std::function<bool(const Held&)>& isOver, std::optional<c10::Stream> user);

  const c10::Device device_;
  DroppingMutex& drops_;
  std::optional<c10::Stream> stream_;  // nothing on the CPU
  uint64_t last_ = 0;                  // number of the latest mark
  uint64_t over_ = 0;                  // latest call that the host has waited for
  CaptureWatch captures_;              // of the compute streams
  std::vector<Held> held_;
};

}  // namespace ebb
