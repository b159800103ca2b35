// Recorded steps: a log of when a step takes pages and gives them back, from which ebb computes the
// sizes of pools.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

#include "plugins/paging/schedule.h"

namespace ebb {

// Tensors that share a pool.
struct PoolKey {
  c10::Device device = c10::kCPU;
  c10::ScalarType dtype = c10::ScalarType::Byte;
  int64_t rowBytes = 0;

  bool operator<(const PoolKey& other) const {
    const auto numbers = [](const PoolKey& key) {
      return std::make_tuple(key.device.type(), key.device.index(), key.dtype, key.rowBytes);
    };
    return numbers(*this) < numbers(other);
  }
};

// A step's peak needs of one pool.
struct PageNeed {
  int64_t pages = 0;      // in use at a time
  int64_t stackRows = 0;  // in use at a time, if rows are given back in reverse order only
  int64_t rows = 0;       // valid rows at a time
  int64_t padded = 0;     // rows at a time, valid and padding
  int64_t largest = 0;    // valid rows of one tensor

  void raiseTo(const PageNeed& other) {
    pages = std::max(pages, other.pages);
    stackRows = std::max(stackRows, other.stackRows);
    rows = std::max(rows, other.rows);
    padded = std::max(padded, other.padded);
    largest = std::max(largest, other.largest);
  }
};
using PageNeeds = std::map<PoolKey, PageNeed>;

// The log of recorded steps. See Note [How pools are sized].
struct PageLog {
  bool recordNext = false;  // the next step is to be recorded
  bool isRecording = true;  // valid rows of the current step are copied instead of paged; false
                            // once pools exist

  // A step begins; it is recorded if `recordNext` is set.
  void stepBegins();

  // True if the log of the recorded step can size pools.
  bool isComplete() const { return isRecording && !records_.empty(); }

  // Logs a tensor of `total` rows, of which `rows` are valid. Returns the tensor's number.
  size_t stashed(const PoolKey& pool, int64_t rows, int64_t total, const ScheduleEntry& entry);

  // Logs that the tensor is back, or was dropped.
  void gone(size_t number);

  // Empties the log. Returns the needs without the tensors of entries for which `skipped` is true:
  // later steps do not page these.
  PageNeeds takeNeeds(int64_t pageRows, const std::function<bool(const ScheduleEntry&)>& skipped);

 private:
  struct Record {
    PoolKey pool;
    int64_t rows;  // valid
    int64_t total;
    ScheduleEntry entry;
    size_t stash;  // index of the tensor's stashed() record: this one, or, in gone(), an earlier
  };

  std::vector<Record> records_;  // in order of occurrence
};

}  // namespace ebb
