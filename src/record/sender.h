// Decides where the bytes of kept values go: they stay, or are sent to the host or to pages.
#pragma once

#include <ATen/core/TensorBody.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <vector>

#include "graph/value.h"
#include "record/context.h"

namespace ebb {

// True if an autograd function outside of the region has computed `tensor`, an input of the region.
// False for parameters and their views.
bool isActivation(const at::Tensor& tensor);

// See Note [Offloaded values]
class Sender {
 public:
  explicit Sender(const Context& context) : context_(context) {
  }

  // From now on the value, shown by `tensor`, holds its bytes.
  void keep(Value& value, const at::Tensor& tensor);

  // Records a fingerprint of the bytes of a leaf: see Note [Fingerprints of leaves].
  void takeFingerprint(Value& value);

  // Records a fingerprint of a computed value that the program may still hold.
  void watchEscaped(Value& value);

  // Sends the value's bytes, in `storage`, to their destination. After a failure, keeps the bytes,
  // or drops recomputable bytes.
  void send(Value& value, const c10::Storage& storage);

  // True if the value, shown by `tensor`, may be sent to its destination.
  static bool canLeave(const Value& value, const at::Tensor& tensor);

  // True if ebb should offload or page `tensor`, an input of the region.
  bool offloadsInput(const at::Tensor& tensor) const;

  // Sends those of `values` that a handle or a recipe needs, and releases the others. `values`
  // lists consumers before inputs, since releasing a consumer may make its inputs unneeded.
  void sendKept(std::vector<c10::intrusive_ptr<Value>> values);

  // Remembers the current stream of `device`: see Note [What is done later].
  void noteStream(c10::Device device);
  // The current stream waits for all remembered streams.
  void joinStreams();

  // Bytes kept since the last call of forgetBytes().
  size_t keptBytes() const {
    return keptBytes_;
  }
  void forgetBytes() {
    keptBytes_ = 0;
  }

  // The outermost region ends.
  void clear();

 private:
  bool sendToHost(Value& value, const c10::Storage& storage);
  bool sendToPages(Value& value, const c10::Storage& storage);

  const Context& context_;
  c10::SmallVector<c10::Stream, 2> streams_;  // see Note [What is done later]
  size_t keptBytes_ = 0;
  bool sendsToHost_ = false;  // in this region
};

}  // namespace ebb
