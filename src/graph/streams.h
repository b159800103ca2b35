// The streams that use a graph's bytes, and the order between them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>

namespace ebb {

struct Value;

// Note [Bytes of several streams]
// torch's allocators hand memory out again in the order of the stream that it was allocated on, and
// eager needs nothing more: a saved tensor lives until backward, which runs on the streams that
// forward ran on and waited for. What ebb makes and frees is another matter:
// 1. Bytes that were replayed, copied or brought back on one stream may be asked for on another,
//    which knows nothing of the first. It waits.
// 2. A replay reads what the forward read, perhaps on another stream, and may be the last to hold
//    it; and what autograd would have held until backward, whoever reads it, goes as soon as it
//    may. So memory is told of each stream on which it is used (record_stream).
// Nearly always a graph has one stream on each device. Then a comparison is all that this costs: a
// stream's number is kept with the bytes, and an event is recorded only when another one asks.
//
// Guarded by the graph's lock.
class GraphStreams {
 public:
  // Ops run on the current stream of `device`.
  void note(c10::Device device) {
    if (!device.is_cpu()) {
      currentOf(device);
    }
  }

  // The current stream made the bytes of `value`, which are in `storage`.
  void made(Value& value, const c10::Storage& storage) {
    if (!storage.device().is_cpu()) {
      madeOffCpu(value, storage.device());
    }
  }

  // The current stream uses `storage` from now on, which holds `value`.
  void use(Value& value, const c10::Storage& storage) {
    if (storage && !storage.device().is_cpu()) {
      useOffCpu(value, storage);
    }
  }

  // So may all others that there are, after the current one: they will not say so.
  void share(const c10::Storage& storage) {
    if (several_ && !storage.device().is_cpu()) {
      shareOffCpu(storage);
    }
  }

  // The current stream comes after all that `maker` has been given, which made some of `values`.
  void takeOver(c10::Stream maker, c10::ArrayRef<c10::intrusive_ptr<Value>> values);

  // The streams on which the graph's ops have run, of all devices that have some.
  size_t count() const {
    return all_.size();
  }
  c10::Stream first() const {
    return all_.front();
  }

  // Whether there are several on one device.
  bool areSeveral() const {
    return several_;
  }

 private:
  size_t currentOf(c10::Device device);
  size_t add(c10::Stream stream);
  void madeOffCpu(Value& value, c10::Device device);
  void useOffCpu(Value& value, const c10::Storage& storage);
  void waitForMaker(const Value& value, size_t asker);
  void shareOffCpu(const c10::Storage& storage);

  c10::SmallVector<c10::Stream, 2> all_;
  size_t last_ = 0;  // the place of the one that was seen last
  bool several_ = false;
};

}  // namespace ebb
