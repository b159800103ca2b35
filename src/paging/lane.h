// The stream on which pages move, beside the compute streams.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "memory/dropping_mutex.h"

namespace ebb {

// Note [The lane]
// Calls on a device's pools run one after the other on one stream of ours, the lane. What is a
// pool's own, its memory and its tickets, is allocated there: calls that use nothing else wait for
// nothing, and it can be freed at any time. A call that uses a tensor runs after what the compute
// stream, the one that is current, was given before it; that waits for what it needs, and nobody
// else waits.
// The tensor is held until the compute stream has waited for the call: then what comes next there
// may have its memory. Each stream lets go only of what it has given itself, so that the memory of
// one never waits for another. When a step is over, one stream waits for all that is left, and the
// allocator is told of it (noteUse); it is told too that a stream reads what another has made.
// Where there is one compute stream neither does anything.
// On the CPU there is no lane: calls are done when they return.
//
// Note [Pages in a CUDA graph]
// All of it can be captured. A stream that is captured may not wait for an event from outside, nor
// the reverse, so each call knows of which capture it is, and nobody waits for one of another: what
// was given before a capture is over when the graph runs (torch.cuda.graph waits for the device
// first), and what a capture was given has not run. What is held for it is let go when it is over,
// well or not. Before it ends the compute stream must have waited for the lane's last call: when
// all has come back it has.
// What is captured is run on other streams later. So where a graph has a pool, all of the pool's
// calls run after what the compute stream was given, and that waits for each, and for what is given
// back when a step is over.
class PageLane {
 public:
  // A call, or the end of some.
  struct Call {
    uint64_t number = 0;                      // 0: nothing to wait for
    uint64_t capture = 0;                     // of which it is; 0: of none
    std::shared_ptr<const c10::Event> end{};  // null on the CPU
  };

  // What a call runs after, besides the lane's last one.
  enum class After : uint8_t { Nothing, Compute };

  // `drops` is the lock under which everything here is called.
  PageLane(c10::Device device, DroppingMutex& drops);

  // A call that uses tensors of the compute stream.
  Call run(const std::function<void()>& work, std::vector<c10::Storage> held);

  // A call that nobody waits for by itself; the end of all so far.
  void give(const std::function<void()>& work, After after = After::Nothing);
  Call mark();

  // `bytes`, which `made` allocated, live until that stream or another has waited for `call`.
  void hold(const Call& call, c10::Stream made, c10::Storage& bytes);

  // The compute stream waits for `call`; for the last of those that it has given; for all that
  // something is held for, or simply for all.
  void wait(const Call& call);
  void join();
  void joinAll(bool simply);

  // The host waits for all, unless it is known that all is over. It has waited for `call`.
  void finish();
  void noteOver(const Call& call);

  // Which capture the compute stream takes part in; 0: none.
  uint64_t capture();

  bool isBesideCompute() const {
    return stream_.has_value();
  }

 private:
  struct Held {
    Call until;
    c10::Stream compute;  // to which the memory belongs, as far as is known
    std::vector<c10::Storage> storages;
  };

  bool isCaptured() const;
  void letGo(const std::function<bool(const Held&)>& what, std::optional<c10::Stream> user);

  const c10::Device device_;
  DroppingMutex& drops_;
  std::optional<c10::Stream> stream_;  // nothing on the CPU
  uint64_t last_ = 0;                  // numbers the calls, and the ends
  uint64_t over_ = 0;                  // of one that the host has waited for
  uint64_t captures_ = 0;              // so far
  uint64_t capture_ = 0;               // the one that goes on
  std::vector<Held> held_;
};

}  // namespace ebb
