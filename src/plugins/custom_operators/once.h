// Says something once for each operator.
#pragma once

#include <mutex>
#include <unordered_set>

#include "intercept/op_traits.h"

namespace ebb {

// For a static object. Any thread may ask.
class OnceForEachOp {
 public:
  // True the first time that the function is called with this operator.
  bool isFirst(const OpTraits& op) {
    std::lock_guard<std::mutex> lock(mutex_);
    return seen_.insert(&op).second;
  }

 private:
  std::mutex mutex_;
  std::unordered_set<const OpTraits*> seen_;
};

}  // namespace ebb
