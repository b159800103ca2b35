// Transfers through c10's device-neutral guards and events: one binary serves CPU and CUDA builds.
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/TensorBody.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <optional>

#include "intercept/key.h"
#include "memory/bytes.h"
#include "memory/capturing.h"
#include "memory/events.h"
#include "memory/pinned.h"
#include "transfer/transfer.h"

namespace ebb {
namespace {

struct AcceleratorEvent final : Event {
  explicit AcceleratorEvent(c10::Stream stream) : event(recordEvent(stream)) {
  }

  const std::shared_ptr<const c10::Event> event;
};

const c10::Event& eventOf(const Event& event) {
  return *static_cast<const AcceleratorEvent&>(event).event;
}

class AcceleratorTransfer final : public Transfer {
 public:
  bool isDevice(c10::Device device) const override {
    return accelerator_ == device.type();
  }

  c10::Stream computeStream(c10::Device device) override {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }

  c10::Stream outStream(c10::Device device) override {
    return streamsOf(device).out;
  }

  c10::Stream inStream(c10::Device device) override {
    return streamsOf(device).in;
  }

  EventPtr record(c10::Stream stream) override {
    return std::make_shared<const AcceleratorEvent>(stream);
  }

  void wait(c10::Stream stream, const EventPtr& event) override {
    eventOf(*event).block(stream);
  }

  bool isDone(const Event& event) override {
    return eventOf(event).query();
  }

  void finish(const Event& event) override {
    eventOf(event).synchronize();
  }

  c10::Storage allocateOnDevice(size_t nbytes, c10::Device device) override {
    return allocate(nbytes, device);
  }

  c10::Storage allocateOnHost(size_t nbytes, c10::Device device) override {
    return allocatePinned(nbytes, device);
  }

  void used(const c10::Storage& storage, c10::Stream stream) override {
    c10::impl::VirtualGuardImpl(stream.device_type())
        .recordDataPtrOnStream(storage.data_ptr(), stream);
  }

  bool isCapturing(c10::Stream stream) override {
    return ebb::isCapturing(stream);
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
    const c10::impl::VirtualGuardImpl guard(device.type());
    // Other code seldom uses streams of high priority.
    const Streams fresh{
        guard.getStreamFromGlobalPool(device, true), guard.getStreamFromGlobalPool(device, true)};
    return streams_.emplace(device.index(), fresh).first->second;
  }

  const std::optional<c10::DeviceType> accelerator_ = at::getAccelerator(false);
  std::mutex mutex_;                             // guards streams_
  std::map<c10::DeviceIndex, Streams> streams_;  // by device
};

}  // namespace

Transfer& acceleratorTransfer() {
  // Leaked on purpose: threads that outlive static objects may use streams and events.
  static auto* instance = new AcceleratorTransfer;
  return *instance;
}

}  // namespace ebb
