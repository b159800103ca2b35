// The stream on which pages move, beside the compute stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "memory/dropping_mutex.h"

namespace ebb {

// Note [The lane]
// A pool's calls run one after the other on one stream of ours, its lane. Each runs after what the
// compute stream was given before it; the compute stream waits for what it needs, and nobody else
// waits. What a call reads or writes is held until the compute stream has waited for it, so that
// its memory can be given to what the compute stream does next. All of it can be captured; before a
// capture ends the compute stream must have waited for the last call. On the CPU there is no lane:
// calls are done when they return.
class PageLane {
 public:
  // One of them.
  struct Call {
    uint64_t number = 0;  // 0: nothing to wait for
    std::shared_ptr<c10::Event> end;
  };

  // `drops` is the lock under which everything here is called.
  PageLane(c10::Device device, DroppingMutex& drops);

  Call run(const std::function<void()>& work, std::vector<c10::Storage> held);

  // The compute stream waits for `call`, and nothing is held for it any more.
  void wait(const Call& call);

  // The same for all calls so far.
  void join();

  bool isBesideCompute() const {
    return stream_.has_value();
  }

 private:
  struct Held {
    Call until;
    std::vector<c10::Storage> storages;
  };

  const c10::Device device_;
  DroppingMutex& drops_;
  std::optional<c10::Stream> stream_;  // nothing on the CPU
  uint64_t last_ = 0;                  // numbers the calls
  std::deque<Held> held_;              // in the order of the calls
};

}  // namespace ebb
