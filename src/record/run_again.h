// Running an intercepted call again, when an allocation in it has failed.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <vector>

#include "intercept/interceptor.h"
#include "kernel/random_state.h"
#include "record/arguments.h"

namespace ebb {

// What a boxed call takes from its stack, for another run.
struct KeptArguments {
  std::vector<c10::IValue> values;
  size_t below;  // how many the stack has besides
};

// Null if the call would not be run again.
std::unique_ptr<KeptArguments> keepArguments(const Call& call, const Arguments& arguments);

// In the handler of what a run of the call has thrown: gives the results of one that came to its
// end. `kept`: of a boxed call. `random`: null if it draws nothing. Throws what the last run threw.
const c10::IValue* runAgain(
    Call& call, const Arguments& arguments, const KeptArguments* kept, RandomScope* random);

}  // namespace ebb
