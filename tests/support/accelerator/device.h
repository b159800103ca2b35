// What torch asks of a device: its streams and events, its memory, its generators.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <utility>

#include "generator.h"
#include "memory.h"
#include "streams.h"

namespace late {

inline c10::Stream streamOf(int number) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, number);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {
  }
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device) const override {
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {
  }
  c10::Stream getStream(c10::Device) const override {
    return streamOf(currentStream);
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return streamOf(0);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return streamOf(1 + nextStream++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return streamOf(std::exchange(currentStream, static_cast<int>(stream.id())));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  void record(
      void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    std::lock_guard lock(mutex);
    const int number = static_cast<int>(stream.id());
    delete static_cast<EventState*>(*event);
    *event = new EventState{number, queues[number].given};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      const EventState until = *static_cast<EventState*>(event);
      enqueue(static_cast<int>(stream.id()), [until] { finish(until.stream, until.number); });
    }
  }
  bool queryEvent(void* event) const override {
    std::lock_guard lock(mutex);
    const auto* until = static_cast<EventState*>(event);
    return until == nullptr || queues[until->stream].done >= until->number;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      finish(static_cast<EventState*>(event)->stream, static_cast<EventState*>(event)->number);
    }
  }
  bool queryStream(const c10::Stream& stream) const override {
    std::lock_guard lock(mutex);
    return queues[stream.id()].waiting.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    finish(static_cast<int>(stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    for (int stream = kStreams; stream-- > 0;) {  // the ones that were taken last come first
      finish(stream);
    }
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex) const override {
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinnedMemory;
  }
  bool isPinnedPtr(const void* pointer) const override {
    return isPinned(pointer);
  }
  at::Device getDeviceFromPtr(void*) const override {
    return kDevice;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    TORCH_CHECK(hasGenerator, "late: it has no generator");
    return defaultGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<DeviceGenerator>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    finish(currentStream);
    at::DataPtr fresh = deviceMemory.allocate(nbytes);
    if (const size_t both = std::min(nbytes, storage.nbytes()); both > 0) {
      std::memcpy(fresh.get(), storage.data(), both);
    }
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(nbytes);
  }
};

}  // namespace late
