// Transfers through c10's device-neutral guards and events: one binary serves CPU and CUDA builds.
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/TensorBody.h>
#include <c10/core/DeviceType.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "memory/bytes.h"
#include "plugins/offload/transfer/pinned.h"
#include "plugins/offload/transfer/transfer.h"
#include "stream/event.h"
#include "stream/stream.h"
#include "torch_seams/key.h"

namespace ebb {
namespace {

struct AcceleratorEvent final : TransferEvent {
  explicit AcceleratorEvent(c10::Stream stream) : event(recordEvent(stream)) {}
  bool isDone() const override { return event->query(); }
  void wait() const override { event->synchronize(); }

  const EventPtr event;
};

class AcceleratorTransfer final : public Transfer {
 public:
  bool isDevice(c10::Device device) const override { return accelerator_ == device.type(); }

  c10::Stream computeStream(c10::Device device) override { return currentStream(device); }

  c10::Stream outStream(c10::Device device) override { return streamsOf(device).out; }

  c10::Stream inStream(c10::Device device) override { return streamsOf(device).in; }

  TransferEventPtr record(c10::Stream stream) override {
    return std::make_shared<const AcceleratorEvent>(stream);
  }

  void wait(c10::Stream stream, const TransferEventPtr& event) override {
    static_cast<const AcceleratorEvent&>(*event).event->block(stream);
  }

  c10::Storage allocateOnDevice(size_t nbytes, c10::Device device) override {
    return allocate(nbytes, device);
  }

  c10::Storage allocateOnHost(size_t nbytes, c10::Device device) override {
    return allocatePinned(nbytes, device);
  }

  void copy(const c10::Storage& to, const c10::Storage& from, size_t nbytes, c10::Stream stream)
      override {
    const auto below = belowEverything();
    c10::StreamGuard on(stream);
    bytesOf(to, nbytes).copy_(bytesOf(from, nbytes), true);
  }

 private:
  struct Streams {
    c10::Stream out;
    c10::Stream in;
  };

  const Streams& streamsOf(c10::Device device) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto known = streams_.find(device.index());
    if (known != streams_.end()) {
      return known->second;
    }
    const Streams fresh{streamFromPool(device, true), streamFromPool(device, true)};
    return streams_.emplace(device.index(), fresh).first->second;
  }

  const std::optional<c10::DeviceType> accelerator_ = at::getAccelerator(false);
  std::mutex mutex_;                             // guards streams_
  std::map<c10::DeviceIndex, Streams> streams_;  // by device
};

// A build for an accelerator may run on a machine without a device.
bool hasAccelerator() {
  const auto type = at::getAccelerator(false);
  return type && c10::impl::hasDeviceGuardImpl(*type) && at::accelerator::deviceCount() > 0;
}

}  // namespace

// torch's built-in accelerator is known at once; a backend out of tree may be registered at any
// time.
bool acceleratorIsThere() {
  static std::atomic<bool> isThere{hasAccelerator()};
  if (!isThere.load(std::memory_order_relaxed) && c10::is_privateuse1_backend_registered()) {
    isThere.store(hasAccelerator(), std::memory_order_relaxed);
  }
  return isThere.load(std::memory_order_relaxed);
}

std::shared_ptr<Transfer> acceleratorTransfer() { return std::make_shared<AcceleratorTransfer>(); }

}  // namespace ebb
