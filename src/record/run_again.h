// Running an intercepted call again, when an allocation in it has failed.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <memory>
#include <vector>

#include "intercept/interceptor.h"
#include "kernel/random_state.h"
#include "record/arguments.h"

namespace ebb {

// What a call takes or changes, for another run.
struct KeptArguments {
  // What was in a storage that the call writes.
  struct Before {
    c10::Storage storage;
    c10::Storage bytes;
  };

  std::vector<c10::IValue> values;  // of a boxed call
  size_t below = 0;                 // how many its stack has besides
  std::vector<Before> written;
};

// Whether a call takes or changes something.
inline bool usesUp(const Call& call, const Arguments& arguments) {
  return call.stack != nullptr || !arguments.writes().empty();
}

// Runs it, and again if that fails and can be mended. `holds`: what it takes or changes is held
// meanwhile. `random`: null if the call draws nothing.
const c10::IValue* runKeeping(
    Call& call, const Arguments& arguments, bool holds, RandomScope* random);

// Null if the call would not be run again.
std::unique_ptr<KeptArguments> keepArguments(const Call& call, const Arguments& arguments);

// In the handler of what a run of the call has thrown: gives the results of one that came to its
// end. `kept`: null if nothing was. `random`: null if the call draws nothing. Throws what the last
// run threw.
const c10::IValue* runAgain(
    Call& call, const Arguments& arguments, const KeptArguments* kept, RandomScope* random);

}  // namespace ebb
