// What all values of one outermost region share.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ebb/verify.h"
#include "graph/lookahead.h"
#include "graph/streams.h"
#include "kernel/kernel_state.h"
#include "report/journal.h"
#include "support/python_mutex.h"

namespace ebb {

// Note [One lock per graph]
// Recipes never cross an outermost region (a storage first met in a region is a leaf there), so
// graphs are independent and each has one lock. It is held while the region records an op, but not
// while that op's kernel runs, and during a whole replay, kernels included; see Note [Locks and the
// GIL]. Destructors of handles, values and recipes take no lock of a graph: they only count
// references.
struct Escaped;
struct PageGroup;

// Note [What only ebb holds]
// The program holds most inputs of regions itself, such as parameters and a batch. It drops others,
// such as the activation that one block hands to the next, or a weight that was dequantised for one
// call. Such a storage then stays alive for backward alone. ebb knows this when the storage is
// freed: if ebb drops the last reference, nobody else held the storage. A value, a handle or a
// replay may drop it. A value does not know its region, so it is marked and its graph counts the
// bytes. Handles and replays count them directly. A storage that is freed when the recorder's map
// is cleared was not needed by backward, and does not count.
//
// Its members are many: what a region leaves for its backward, each a room's own.
struct EBB_API Graph final : c10::intrusive_ptr_target {
  PythonMutex mutex;                    // See Note [One lock per graph]
  std::vector<std::string> names;       // of the regions nested in this one; the outermost is first
  KernelStates kernelStates;            // in which recipes were recorded
  GraphStreams streams;                 // see Note [Bytes of several streams]
  uint64_t lastSequence = 0;            // of the recipe recorded last; replay runs in this order
  VerifyMode verify = VerifyMode::Off;  // see Note [Verify mode]
  JournalPtr journal;                   // null but while reports are recorded
  uint64_t numberInJournal = 0;         // counts those that were recorded into it
  uint32_t lastVisit = 0;               // marks recipes that a search for work has seen
  std::shared_ptr<PageGroup> pages;     // what its values have in page pools; null until one has
  std::vector<Escaped> escapes;         // see Note [Escapes]; to be filled again
  std::atomic<bool> hasEscapes{false};  // that is not empty
  bool hadBackward = false;             // one was begun inside; of the thread that records
  std::vector<c10::weak_intrusive_ptr<Value>> fromOutside;  // see Note [What only ebb holds]
  std::unique_ptr<Lookahead> lookahead;  // see Note [Replays ahead of backward]; null: none

  Graph();
  ~Graph() override;

  void release_resources() override;

 private:
  void countFromOutside();
};

}  // namespace ebb
