// Runs an intercepted call again after a failed allocation.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <memory>
#include <vector>

#include "intercept/interceptor.h"
#include "kernel/random_state.h"
#include "record/arguments.h"

namespace ebb {

// Arguments taken from the stack or written by a call, kept for another run.
struct KeptArguments {
  // Old contents of a written storage.
  struct Before {
    c10::Storage storage;
    c10::Storage bytes;
  };

  std::vector<c10::IValue> values;  // arguments of a boxed call
  size_t below = 0;                 // other values on its stack, below the arguments
  std::vector<Before> written;
};

// True if a call takes its arguments from the stack, or writes to an argument.
inline bool usesUp(const Call& call, const Arguments& arguments) {
  return call.stack != nullptr || !arguments.writes().empty();
}

// Runs the call, and runs it again while an allocation fails and ebb can free memory. `holds`: keep
// the arguments for another run. `random`: null if the call draws nothing.
const c10::IValue* runKeeping(
    Call& call, const Arguments& arguments, bool holds, RandomScope* random);

// Null if there is nothing to keep, or if the call must not be run again.
std::unique_ptr<KeptArguments> keepArguments(const Call& call, const Arguments& arguments);

// Called in the handler of an exception of the call. Frees memory and runs the call again, until a
// run succeeds; returns the results. If there is no memory to free or the call must not be run
// again, throws the exception of the last run. `kept`: null if nothing was kept. `random`: null if
// the call draws nothing.
const c10::IValue* runAgain(
    Call& call, const Arguments& arguments, const KeptArguments* kept, RandomScope* random);

}  // namespace ebb
