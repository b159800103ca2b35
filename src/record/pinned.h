// What regions hold because no rule says that an operator from elsewhere can be repeated.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "graph/value.h"
#include "intercept/op_traits.h"

namespace ebb {

// The results of one outermost region's operators that the policy would recompute, and that are
// kept: see Note [Operators from elsewhere].
class Pinned {
 public:
  void add(const c10::intrusive_ptr<Value>& result, const OpTraits& op) {
    all_.push_back({c10::weak_intrusive_ptr<Value>(result), &op});
  }

  // The region ends: its recorder still knows which of them autograd has saved.
  void closing();

  // It has ended: what is left of them is held. The log is told, once for each operator.
  void tell(const std::string& region);

 private:
  struct Result {
    c10::weak_intrusive_ptr<Value> value;
    const OpTraits* op;
    size_t saved = 0;  // bytes that autograd holds
  };

  std::vector<Result> all_;
};

}  // namespace ebb
