// What an offload engine and its parts have in common.
#pragma once

#include <cstddef>
#include <string>

#include "ebb/offload.h"
#include "memory/dropping_mutex.h"
#include "offload/host_stash.h"
#include "transfer/host_memory.h"
#include "transfer/transfer.h"

namespace ebb {

// What all engines share. The mutex guards all of them.
struct OffloadShared {
  DroppingMutex mutex;
  OffloadSettings settings;      // from configure()
  OffloadStats stats;            // counts
  bool warnedOfFailure = false;  // under these settings, that a copy to the host or disk failed

  static OffloadShared& get();
};

// Of one engine.
struct OffloadContext {
  explicit OffloadContext(Transfer& transfer);

  void drop(c10::Storage& storage) {
    shared.mutex.drop(storage);
  }

  // A disk that fails does so for every tensor, so it is told of once. `remains`: ", stays ..."
  void warnOfFailure(const HostStash& stash, const char* remains, const std::string& error);

  OffloadShared& shared;
  const OffloadSettings& settings;  // shared
  OffloadStats& stats;              // shared
  Transfer& via;
  HostMemory host;         // in use and free
  StashesInOrder away;     // on the host and not on their way anywhere
  StashesInOrder spilled;  // on disk
};

}  // namespace ebb
