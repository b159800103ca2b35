// Values with the decision Page: rows that live, settings, and what moved.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ebb/export.h"
#include "ebb/fields.h"

namespace ebb {

// Says that of `tensor` only the first rows live: `rows` is one integer on the tensor's device, or
// counts whose sum it is. What is in the other rows must not matter to anything that the program
// computes. Operators of the region that keep rows apart pass it on to their results; values with
// the decision Page are paged if it has reached them. Nothing outside of regions. Throws
// c10::ValueError if the tensor's rows do not follow each other in a storage of its own, or if
// `rows` cannot be, where that is known on the host; c10::TypeError if it is no integer.
EBB_API void markRows(const at::Tensor& tensor, const at::Tensor& rows);

// What happens when a page pool has no room: the gradients of the step then are of no use.
enum class PageOverflowMode : uint8_t {
  Deferred,  // pagingStepOk() tells; until then nobody waits
  Blocking,  // throws PageOverflow in the step; the host waits for each stash
  Assert,    // asserts on the device
};

// What dead rows come back as.
enum class DeadRows : uint8_t {
  Repeat,  // copies of the first row that lives: as harmless as that is
  Zero,
  Nan,   // zeros in tensors that have no NaN
  None,  // whatever is in fresh memory
};

// How values with the decision Page move.
struct PagingSettings {
  int64_t pageRows = 64;          // rows of a page
  double headroom = 1.1;          // of a pool, over what the recorded step needed
  double hostHeadroom = 0;        // of its second tier in pinned memory, over the same
  size_t deviceLimit = SIZE_MAX;  // most bytes of all pools of a device
  PageOverflowMode overflow = PageOverflowMode::Deferred;
  DeadRows deadRows = DeadRows::Repeat;
  int32_t prefetch = -1;  // layers whose pages come back ahead: 0 or 1; -1: 1 on accelerators only

  static constexpr auto fields(auto function) {
    return function(
        Field{"page_rows", &PagingSettings::pageRows},
        Field{"headroom", &PagingSettings::headroom},
        Field{"host_headroom", &PagingSettings::hostHeadroom},
        Field{"device_limit", &PagingSettings::deviceLimit},
        Field{"overflow", &PagingSettings::overflow},
        Field{"dead_rows", &PagingSettings::deadRows},
        Field{"prefetch", &PagingSettings::prefetch});
  }
};

// For the whole process, from the next pool on. Throws c10::ValueError for what makes no sense.
EBB_API void configurePaging(const PagingSettings& settings);
EBB_API PagingSettings pagingSettings();

// Whether the gradients of the step are good; see PageOverflowMode. Waits for the pools. If they
// are not, the next step runs unpaged and larger pools are made after it.
EBB_API bool pagingStepOk();

// Thrown in blocking mode. In Python it is ebb.PageOverflowError.
class EBB_API PageOverflow : public c10::Error {
 public:
  using Error::Error;
};

// One page pool.
struct PagePoolStats {
  std::string device;
  at::ScalarType dtype = at::ScalarType::Byte;
  int64_t rowBytes = 0;
  int64_t pageRows = 0;
  int64_t devicePages = 0;
  int64_t hostPages = 0;
  bool isStack = false;  // rows are given back in the reverse order, so no table is needed
  uint64_t bytes = 0;    // on the device

  static constexpr auto fields(auto function) {
    return function(
        Field{"device", &PagePoolStats::device},
        Field{"dtype", &PagePoolStats::dtype},
        Field{"row_bytes", &PagePoolStats::rowBytes},
        Field{"page_rows", &PagePoolStats::pageRows},
        Field{"device_pages", &PagePoolStats::devicePages},
        Field{"host_pages", &PagePoolStats::hostPages},
        Field{"stack", &PagePoolStats::isStack},
        Field{"bytes", &PagePoolStats::bytes});
  }
};

// What the paging engine did since the start of the process, and what it has now.
struct PagingStats {
  uint64_t steps = 0;          // that stashed anything, or that the user bracketed
  uint64_t recordedSteps = 0;  // of those, without pools
  uint64_t overflows = 0;      // steps that found too little room
  uint64_t spilledSteps = 0;   // of those that were asked about, with rows in the second tier
  uint64_t stashed = 0;        // values
  uint64_t resident = 0;       // values that stayed, since their backward came next
  uint64_t stashes = 0;        // values that are away, now
  uint64_t paddedBytes = 0;    // of the recorded step: held at a time, with dead rows
  uint64_t liveBytes = 0;      // of the recorded step: held at a time, live rows only
  uint64_t poolBytes = 0;      // now, on devices
  uint64_t hostPoolBytes = 0;  // now, in pinned memory
  std::vector<PagePoolStats> pools;
  std::vector<std::string> schedule;  // of the recorded step

  static constexpr auto fields(auto function) {
    return function(
        Field{"steps", &PagingStats::steps},
        Field{"recorded_steps", &PagingStats::recordedSteps},
        Field{"overflows", &PagingStats::overflows},
        Field{"spilled_steps", &PagingStats::spilledSteps},
        Field{"stashed", &PagingStats::stashed},
        Field{"resident", &PagingStats::resident},
        Field{"stashes", &PagingStats::stashes},
        Field{"padded_bytes", &PagingStats::paddedBytes},
        Field{"live_bytes", &PagingStats::liveBytes},
        Field{"pool_bytes", &PagingStats::poolBytes},
        Field{"host_pool_bytes", &PagingStats::hostPoolBytes},
        Field{"pools", &PagingStats::pools},
        Field{"schedule", &PagingStats::schedule});
  }
};

EBB_API PagingStats pagingStats();

}  // namespace ebb
