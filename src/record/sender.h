// What becomes of the bytes that values keep: they are held, or sent to the host or to pages.
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

// See Note [Offloaded values]
class Sender {
 public:
  explicit Sender(const Context& context) : context_(context) {
  }

  // From now on the value, shown by `tensor`, holds its bytes.
  void keep(Value& value, const at::Tensor& tensor);

  // Remembers what a leaf holds: see Note [Fingerprints of leaves].
  void takeFingerprint(Value& value);

  // The same, for a computed value that the program may still hold.
  void watchEscaped(Value& value);

  // Sends the value's bytes, which are in `storage`, where they are to go; or keeps them, or drops
  // them if they can be made again.
  void send(Value& value, const c10::Storage& storage);

  // Autograd packs `tensor`, which shows the value. A small slice may be all that is ever needed,
  // so it waits, as what only recipes read does.
  void sendOrWait(Value& value, const at::Tensor& tensor);

  // `tensor` shows more of the value than the slice that its stash has, or is to have.
  void needAll(Value& value, const at::Tensor& tensor);

  // Whether the value, which `tensor` shows, may be sent where it is to go.
  static bool canLeave(const Value& value, const at::Tensor& tensor);

  // Whether what the region reads in `tensor` is to be sent: what another autograd function
  // computed; no parameter, and no view of one.
  bool offloadsInput(const at::Tensor& tensor) const;

  // Sends those that somebody needs. Consumers come before what they consume, and those that
  // nothing needs are let go at once, and with them what only they need.
  void sendKept(std::vector<c10::intrusive_ptr<Value>> values);

  // See Note [What is done later]
  void noteStream(c10::Device device);
  void joinStreams();

  // Bytes that were kept since the last call of forgetBytes.
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
};

}  // namespace ebb
