// What an operator from elsewhere writes without a word in its schema.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <vector>

#include "record/arguments.h"

namespace ebb {

// Note [Unsaid writes]
// The tables say which of torch's operators lie about what they write. Of one from elsewhere (a
// kernel of C++ in a torch.library) nobody knows, and if it writes below torch no version moves. So
// the arguments that such an operator is said to read are compared before and after, by
// fingerprints: on the CPU, where reading them waits for nobody. What has changed counts as an
// opaque write, and the operator is not run again.
class UnsaidWrites {
 public:
  // Before the kernel runs.
  UnsaidWrites(const OpTraits& op, const Arguments& arguments);

  // When it has run, under the graph's lock: what it wrote is a leaf. Whether it wrote anything.
  bool giveUp(ValueMap& values);

  // Says so, once for each operator. Without the graph's lock, since a warning may run Python.
  void warn() const;

 private:
  struct Read {
    at::Tensor tensor;
    uint64_t fingerprint;  // of its storage, before
    uint16_t argument;     // index on the stack
  };

  const OpTraits& op_;
  std::vector<Read> read_;         // one per storage
  const Read* written_ = nullptr;  // the last of them that was written
};

}  // namespace ebb
