// State shared by the parts of an offload engine.
#pragma once

#include <cstddef>
#include <string>

#include "ebb/offload.h"
#include "memory/dropping_mutex.h"
#include "offload/host_stash.h"
#include "transfer/host_memory.h"
#include "transfer/transfer.h"

namespace ebb {

// State shared by all engines. The mutex guards all engines.
struct OffloadShared {
  DroppingMutex mutex;
  OffloadSettings settings;      // set by configure()
  OffloadStats stats;            // counts of all engines
  bool warnedOfFailure = false;  // a failed copy to the host or disk was reported under these
                                 // settings

  static OffloadShared& get();
};

// State of one engine.
struct OffloadContext {
  explicit OffloadContext(Transfer& transfer);

  void drop(c10::Storage& storage) {
    shared.mutex.drop(storage);
  }

  // Warns of a failed copy, once: a failing disk fails for every tensor. `remains`: the end of
  // the warning's sentence, such as "stays in memory".
  void warnOfFailure(const HostStash& stash, const char* remains, const std::string& error);

  OffloadShared& shared;
  const OffloadSettings& settings;  // shared
  OffloadStats& stats;              // shared
  Transfer& via;
  HostMemory host;         // in use and free
  StashesInOrder away;     // on the host, with no copy in progress
  StashesInOrder spilled;  // on disk
};

}  // namespace ebb
