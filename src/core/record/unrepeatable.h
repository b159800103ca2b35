// Results of custom operators, kept because no rule declares the operator repeatable.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "graph/value.h"
#include "intercept/op_traits.h"

namespace ebb {

// Why ebb does not replay a custom operator that a policy or a checkpointed call declares
// repeatable: it was registered with an effect (a print, a counter, a message to another process),
// which a second run would repeat. Null if it was not. A program may register the effect at any
// time, so ebb asks at each call.
const char* effectOf(const OpTraits& op);

// Results of one outermost region that are kept against the policy's decision to recompute: see
// Note [Custom operators].
class Unrepeatable {
 public:
  void add(const c10::intrusive_ptr<Value>& result, const OpTraits& op) {
    all_.push_back({c10::weak_intrusive_ptr<Value>(result), &op});
  }

  // Called when the region ends, before the recorder drops its values. Notes which results autograd
  // has saved.
  void closing();

  // The region has ended, so all remaining results are resident. Logs each operator once.
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
