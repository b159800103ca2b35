// A deterministic accelerator for tests: CPU tensors count as tensors of a device.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "copy_queue.h"
#include "plugins/offload/transfer/transfer.h"

namespace ebb {

// Note [The fake accelerator]
// torch's own ops run at once, on the "compute streams"; copies are only queued, and run when a
// test says so, or when a stream or the host waits for them, at the last moment that hardware would
// allow. A copy reads and writes memory when it runs, and holds nothing: so a source that is
// written or freed too early, or a result that is read too early, gives wrong bytes, as on
// hardware, but each time. Besides, these are reported as violations:
// 1. a storage was freed while a copy from or to it was queued;
// 2. a copy was queued that conflicts with an earlier one which the host does not know to be done,
//    and nothing orders the two; copies of two compute streams share no memory of the device;
// 3. a copy from the device was queued that need not run after what the compute stream on which its
//    storage was packed had been given then: what it reads may not be there yet;
// 4. a copy to the device was queued that need not run after what the caller's compute stream was
//    given: the memory it writes to may still be in use.
// Memory that is allocated, and host memory that is freed, is filled with 0xA5.
class FakeTransfer final : public Transfer {
 public:
  explicit FakeTransfer(size_t hostBytes);

  bool isDevice(c10::Device device) const override;
  c10::Stream computeStream(c10::Device device) override;
  c10::Stream outStream(c10::Device device) override;
  c10::Stream inStream(c10::Device device) override;
  TransferEventPtr record(c10::Stream stream) override;
  void wait(c10::Stream stream, const TransferEventPtr& event) override;
  void packed(const c10::Storage& storage) override;
  c10::Storage allocateOnDevice(size_t nbytes, c10::Device device) override;
  c10::Storage allocateOnHost(size_t nbytes, c10::Device device) override;
  void copy(
      const c10::Storage& to, const c10::Storage& from, size_t nbytes, c10::Stream stream) override;

  // An event with this clock: true if it is done; the host waits for it.
  bool isDone(const Clock& clock);
  void finish(const Clock& clock);

  // Runs the `count` copies that were queued first; of those, each as soon as what it waits for
  // ran.
  void advance(size_t count);

  // After so many more, allocations on the device fail.
  void failAllocationsAfter(size_t count);

  // From now on called for each of them, where torch calls observers of a device that is out of
  // memory.
  void onDeviceAllocation(std::function<void()> told);

  // Ops of the calling thread run on the compute stream of this number from now on.
  void useComputeStream(int64_t number);

  struct Counts {
    size_t queued = 0;           // copies that have not run
    size_t copiesOut = 0;        // from device to host, that have run
    size_t copiesIn = 0;         // ... and back
    size_t hostAllocations = 0;  // in all
    size_t hostBytes = 0;        // that exist now
    size_t hostWaits = 0;        // finish() of something that had not run
    size_t deviceWaits = 0;      // a compute stream came to a copy that had not run
    size_t asked = 0;            // calls of isDone() and finish(): not allowed in a capture
  };
  Counts counts();
  std::vector<std::string> takeViolations();  // since the last call

 private:
  struct Packing {
    StreamId stream;
    uint64_t tick;  // of that stream, then
  };

  StreamId computeNumber() const;

  std::mutex mutex_;  // guards everything below
  std::function<void()> onDeviceAllocation_;
  const size_t hostLimit_;                               // bytes
  uint64_t lastTick_ = 0;                                // numbers the events of compute streams
  uint64_t tickOfLastCopy_ = 0;                          // lastTick_ when the last copy was queued
  std::map<const c10::StorageImpl*, Packing> packings_;  // the last of each storage
  CopyQueue queue_;
  std::map<StreamId, Clock> clocks_;                    // what each stream's next copy runs after
  std::map<std::thread::id, StreamId> computeNumbers_;  // of threads that use another than 0
  Counts counts_;                                       // but for those of the queue
  size_t allocationsLeft_ = SIZE_MAX;                   // on the device
  std::shared_ptr<size_t> hostBytes_;                   // shared with the deleters of host memory
};

}  // namespace ebb
