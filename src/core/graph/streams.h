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
// torch's allocators reuse memory in the order of the allocating stream. Eager needs nothing more:
// a saved tensor lives until backward, and backward runs on the streams of forward, which have
// already waited for the tensor. ebb creates and frees memory at other times:
// 1. Bytes replayed, copied or reloaded on one stream may be unpacked on another stream, without an
//    order between the two. ebb makes the second stream wait.
// 2. A replay reads inputs of the forward, perhaps on another stream, and may drop their last
//    reference. ebb also frees memory as early as it can, where autograd would hold it until
//    backward. So ebb tells the allocator of each stream that uses the memory (record_stream).
// A graph nearly always has one stream per device. Then the cost is one comparison: ebb stores a
// stream's number with the bytes, and records an event only when another stream needs the bytes.
//
// Note [Bytes of a capture]
// The kernels of a CUDA graph capture run when the graph is launched. So bytes that a capture
// recomputes for a region outside of it are not there before, and bytes that are recomputed outside
// for a region inside are those of one launch. ebb does not see launches. Such bytes may be used
// only in the place where they were made: in that capture, or in that backward. GraphStreams
// numbers the places. Number 0 is where the region ran, and its bytes may be used everywhere, as
// eager's saved tensors.
//
// The graph's lock guards GraphStreams.
class GraphStreams {
 public:
  // The end of a message about bytes for which mayUse() is false.
  static constexpr const char* kElsewhere =
      "inside a CUDA graph capture and is needed outside of it, or by an earlier backward of a "
      "region that was captured, and ebb does not know which launch of the graph its bytes are of. "
      "Capture forward and backward together, or run one backward for each forward";

  // Notes that ops run on the current stream of `device`.
  void note(c10::Device device) {
    if (!device.is_cpu()) {
      currentOf(device);
    }
  }

  // Notes that the current stream made the bytes of `value`, which are in `storage`.
  void made(Value& value, const c10::Storage& storage) {
    if (!storage.device().is_cpu()) {
      madeOffCpu(value, storage.device());
    }
  }

  // From now on the current stream uses `storage`, which holds `value`.
  void use(Value& value, const c10::Storage& storage) {
    if (storage && !storage.device().is_cpu()) {
      useOffCpu(value, storage);
    }
  }

  // Makes the graph's other streams on the device wait for the current stream. From now on they may
  // use `storage` without a call of use().
  void share(const c10::Storage& storage) {
    if (several_ && !storage.device().is_cpu()) {
      shareOffCpu(storage);
    }
  }

  // Called before ebb makes bytes after the region. See Note [Bytes of a capture].
  void findPlace() {
    if (!all_.empty()) {
      findPlaceOffCpu();
    }
  }

  // False if the bytes of `value` may not be used here: see Note [Bytes of a capture].
  bool mayUse(const Value& value) { return all_.empty() || mayUseOffCpu(value); }

  // True if findPlace() found another place than the region's.
  bool isElsewhere() const { return here_ != 0; }

  // True if the region ran in a capture.
  bool areOfCapture() const { return recordedIn_ != 0; }

  // Number of streams on which the graph's ops have run, on all devices.
  size_t count() const { return all_.size(); }
  c10::Stream first() const { return all_.front(); }

  // True if a device has several streams.
  bool areSeveral() const { return several_; }

 private:
  size_t currentOf(c10::Device device);
  size_t add(c10::Stream stream);
  void madeOffCpu(Value& value, c10::Device device);
  void useOffCpu(Value& value, const c10::Storage& storage);
  void waitForMaker(const Value& value, size_t asker);
  void shareOffCpu(const c10::Storage& storage);
  void findPlaceOffCpu();
  bool mayUseOffCpu(const Value& value);

  // See Note [Bytes of a capture]
  struct Place {
    uint64_t capture = 0;
    int backward = 0;  // the number of autograd's graph task; 0 in a capture
    bool operator==(const Place&) const = default;
  };

  c10::SmallVector<c10::Stream, 2> all_;
  uint64_t recordedIn_ = 0;  // the region's capture; 0: none
  Place other_;              // the last place other than the region's
  uint8_t others_ = 0;       // number of other_
  uint8_t here_ = 0;         // number of the place where bytes are made now
  size_t last_ = 0;          // index of the stream that was current last
  bool several_ = false;
};

}  // namespace ebb
