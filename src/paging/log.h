// What a step stashed and gave back, and how large its pools must be.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <map>
#include <tuple>
#include <vector>

#include "paging/schedule.h"

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

// What a step needed of one pool, at the most.
struct PageNeed {
  int64_t pages = 0;      // in use at a time
  int64_t stackRows = 0;  // in use at a time, if rows come back in the reverse order only
  int64_t rows = 0;       // that lived at a time
  int64_t padded = 0;     // rows at a time, live and dead
  int64_t largest = 0;    // live rows of one tensor
};
using PageNeeds = std::map<PoolKey, PageNeed>;

class PageLog {
 public:
  void clear() {
    events_.clear();
  }
  bool isEmpty() const {
    return events_.empty();
  }

  // A tensor of `total` rows, of which `rows` live. Gives its number.
  size_t stashed(const PoolKey& pool, int64_t rows, int64_t total, const ScheduleEntry& entry);
  void gone(size_t number);

  // Without what `skipped` says is not paged.
  PageNeeds needs(int64_t pageRows, const std::function<bool(const ScheduleEntry&)>& skipped) const;

 private:
  struct Event {
    PoolKey pool;
    int64_t rows;  // that live
    int64_t total;
    ScheduleEntry entry;
    size_t stash;  // place of the event at which it was stashed; its own: that event
  };

  std::vector<Event> events_;  // in the order in which they came
};

}  // namespace ebb
