// State shared by the parts of an offload engine.
#pragma once

#include <ATen/core/TensorBody.h>

#include <memory>

#include "ebb/offload.h"
#include "plugins/offload/host_stash.h"
#include "plugins/offload/transfer/host_memory.h"
#include "plugins/offload/transfer/transfer.h"
#include "stores/dropping_mutex.h"

namespace ebb {

// State shared by all engines. The mutex guards all engines, but not `instead` and `optedOut`.
struct OffloadShared {
  DroppingMutex mutex;
  OffloadSettings settings;          // set by configure()
  OffloadStats stats;                // counts of all engines
  bool warnedOfFailure = false;      // a failed copy to the host or disk was reported under these
                                     // settings
  std::shared_ptr<Offload> instead;  // a test's engine, or null
  bool (*optedOut)(const at::Tensor&) = nullptr;  // see setOffloadOptOut()

  static OffloadShared& get();
};

// State of one engine.
struct OffloadContext {
  explicit OffloadContext(Transfer& transfer) : via(transfer) {}

  void drop(c10::Storage& storage) { shared.mutex.drop(storage); }

  // Removes the stash from both lists below.
  void takeOut(const HostStash& stash) {
    away.erase(stash.sent.sequence);
    spilled.erase(stash.sent.sequence);
  }

  OffloadShared& shared = OffloadShared::get();
  const OffloadSettings& settings = shared.settings;
  OffloadStats& stats = shared.stats;
  Transfer& via;
  HostMemory host{via};    // in use and free
  StashesInOrder away;     // on the host, with no copy in progress
  StashesInOrder spilled;  // on disk
};

}  // namespace ebb
