// Detects undeclared writes of a custom operator.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <vector>

#include "record/arguments.h"

namespace ebb {

// Note [Unsaid writes]
// ebb's tables list torch's operators whose schemas omit writes. For a custom operator (a C++
// kernel in a torch.library) there is no such list, and a write below torch moves no version. So on
// the CPU, where reading bytes waits for nothing, ebb compares fingerprints of the read-only
// arguments before and after the run. A changed argument counts as an opaque write, and the
// operator is not replayed.
class UnsaidWrites {
 public:
  // Takes the fingerprints before the kernel runs.
  UnsaidWrites(const OpTraits& op, const Arguments& arguments);

  // Called after the kernel, under the graph's lock. Turns the value of each changed
  // argument into a leaf. Returns true if an argument has changed.
  bool giveUp(ValueMap& values);

  // Releases the arguments, and warns once per operator. Called without the graph's lock, since
  // both may run Python.
  void warn();

 private:
  struct Read {
    at::Tensor tensor;
    uint64_t fingerprint;  // of the tensor's storage, before the run
    uint16_t argument;     // index on the stack
  };

  const OpTraits& op_;
  std::vector<Read> read_;  // one per storage
  int written_ = -1;        // index on the stack of the last argument found changed; -1: none
};

}  // namespace ebb
