// Values with the decision Page: marking of valid rows, settings and statistics.
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

// Declares that only the first rows of `tensor` are valid. `rows` is an integer on the tensor's
// device, or a tensor of counts whose sum is the number of valid rows. Contents of padding rows
// must not affect anything that the program computes. An operator of the region passes the mark on
// if row i of its result depends only on row i of the marked arguments and on data common to all
// rows. A value with the decision Page is paged only if the mark has reached the value. Outside of
// regions markRows does nothing. Throws c10::ValueError if `tensor` is not contiguous or does not
// cover its storage, or if `rows` is on the CPU and is negative or more than the tensor's rows;
// c10::TypeError if `rows` is not an integer tensor.
EBB_API void markRows(const at::Tensor& tensor, const at::Tensor& rows);

// How ebb reports an overflow of a page pool. After an overflow the step's gradients are invalid.
enum class PageOverflowMode : uint8_t {
  Deferred,  // pagingStepOk() reports the overflow; until then the host never waits
  Blocking,  // throws PageOverflow in the step; the host waits for each stash
  Assert,    // asserts on the device
};

// Contents of padding rows after unpacking.
enum class DeadRows : uint8_t {
  Repeat,  // copies of the first valid row: as harmless as a valid row
  Zero,
  Nan,   // zeros for dtypes without NaN
  None,  // uninitialised memory
};

// Settings for values with the decision Page.
struct PagingSettings {
  int64_t pageRows = 64;          // rows in a page
  double headroom = 1.1;          // size of a pool relative to the recorded step's need
  double hostHeadroom = 0;        // the same for a second tier in pinned memory; 0: none
  size_t deviceLimit = SIZE_MAX;  // most bytes of all pools of a device
  PageOverflowMode overflow = PageOverflowMode::Deferred;
  DeadRows deadRows = DeadRows::Repeat;
  int32_t prefetch = -1;  // layers whose pages are prefetched: 0 or 1; -1: 1 on accelerators only

  EBB_FIELDS(PagingSettings, pageRows, headroom, hostHeadroom, deviceLimit, overflow, deadRows,
             prefetch)
};

// The settings apply to the whole process, from the next pool on. Throws c10::ValueError for
// invalid settings.
EBB_API void configurePaging(const PagingSettings& settings);
EBB_API PagingSettings pagingSettings();

// True if the step's gradients are valid; see PageOverflowMode. Waits for the pools. After an
// overflow the next step runs unpaged, and ebb then creates larger pools.
EBB_API bool pagingStepOk();

// Thrown in blocking mode; ebb.experimental.PageOverflowError in Python.
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
  bool isStack = false;  // rows are freed in reverse order of stashing, so the pool needs no table
  uint64_t bytes = 0;    // on the device

  EBB_FIELDS(PagePoolStats, device, dtype, rowBytes, pageRows, devicePages, hostPages, isStack,
             bytes)
};

// Counts of the paging engine since the process started, and the current state.
struct PagingStats {
  uint64_t steps = 0;          // steps with a stash, and steps that the user has begun
  uint64_t recordedSteps = 0;  // steps run without pools, to size the pools
  uint64_t overflows = 0;      // steps that found too little room
  uint64_t spilledSteps = 0;   // steps with rows in the second tier; counted only by
                               // pagingStepOk()
  uint64_t stashed = 0;        // values stashed
  uint64_t resident = 0;       // values not paged, because backward of their layer directly
                               // followed the forward
  uint64_t stashes = 0;        // values currently in pools
  uint64_t paddedBytes = 0;    // peak of the recorded step with padding rows
  uint64_t liveBytes = 0;      // peak of the recorded step, valid rows only
  uint64_t poolBytes = 0;      // current, on devices
  uint64_t hostPoolBytes = 0;  // current, in pinned memory
  std::vector<PagePoolStats> pools;
  std::vector<std::string> schedule;  // schedule of the recorded step

  EBB_FIELDS(PagingStats, steps, recordedSteps, overflows, spilledSteps, stashed, resident, stashes,
             paddedBytes, liveBytes, poolBytes, hostPoolBytes, pools, schedule)
};

EBB_API PagingStats pagingStats();

}  // namespace ebb
