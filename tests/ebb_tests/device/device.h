// What torch asks of a device: its streams and events, its memory, its generators.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <utility>

#include "generator.h"
#include "memory.h"
#include "streams.h"
#include "tensors.h"

namespace late {

inline void setDevice(c10::Device device) {
  if (device.has_index()) {
    TORCH_CHECK(device.index() < kDevices, "late: there is no ", device);
    currentDevice = device.index();
  }
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    late::setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kType, static_cast<c10::DeviceIndex>(currentDevice));
  }
  void setDevice(c10::Device device) const override { late::setDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) {
      currentDevice = device.index();
    }
  }
  c10::Stream getStream(c10::Device device) const override {
    return streamOf(currentOf[resolved(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return streamOf(resolved(device) * kStreamsEach);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  // As on hardware, streams of high priority are others.
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool isHighPriority) const override {
    constexpr int kHigh = 8;
    constexpr int kOrdinary = kStreamsEach - 1 - kHigh;
    static std::array<std::array<std::atomic<int>, 2>, kDevices> taken{};
    const int at = resolved(device);
    const int number = taken[at][isHighPriority ? 1 : 0]++;
    return streamOf(
        at * kStreamsEach + 1 + (isHighPriority ? kOrdinary + number % kHigh : number % kOrdinary));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return streamOf(std::exchange(currentOf[stream.device_index()], indexOf(stream)));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const {  // not before torch 2.12
    return reinterpret_cast<void*>(static_cast<intptr_t>(indexOf(stream) + 1));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    const Lock lock(program);
    ++counts["device count"];
    return kDevices;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Point*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag)
      const override {
    called("record");
    if (*event == nullptr) {
      called("event made");
    }
    delete static_cast<Point*>(*event);
    const bool timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    *event = new Point(timed ? timedEndOf(indexOf(stream)) : endOf(indexOf(stream)));
  }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {  // in milliseconds
    const Point& first = *static_cast<Point*>(from);
    const Point& last = *static_cast<Point*>(to);
    TORCH_CHECK(first.passed && last.passed, "late: an event is not timed");
    TORCH_CHECK(isDone(first) && isDone(last), "late: a timed event is not done");
    return static_cast<double>(last.passed->load() - first.passed->load()) * 1e-6;
  }
  void block(void* event, const c10::Stream& stream) const override {
    called("wait");
    if (event != nullptr) {
      waitFor(indexOf(stream), *static_cast<Point*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    called("query");
    return event == nullptr || isDone(*static_cast<Point*>(event));
  }
  void synchronizeEvent(void* event) const override {
    called("synchronize");
    if (event != nullptr) {
      const Point& point = *static_cast<Point*>(event);
      if (!isLeftOut(kHost, point.stream)) {
        finish(point);
      }
    }
  }
  bool queryStream(const c10::Stream& stream) const override {
    called("query");
    return isDone(endOf(indexOf(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    called("synchronize");
    finish(indexOf(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    called("synchronize");
    for (int stream = kStreamsEach; stream-- > 0;) {  // the ones that were taken last come first
      finish(resolved(c10::Device(kType, device)) * kStreamsEach + stream);
    }
  }
  bool isStreamCapturing(const c10::Stream& stream) const {  // not before torch 2.12
    TORCH_CHECK(settings.captureError != 0, "late: captures cannot be asked about");
    if (settings.captureError > 0) {
      throw c10::AcceleratorError(
          {__func__, __FILE__, __LINE__}, settings.captureError, "late: another capture");
    }
    const Lock lock(program);
    return isCaptured(indexOf(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    deviceMemory.recordStream(memory, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    late::setDevice(c10::Device(kType, device));
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(currentDevice);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinnedMemory; }
  bool isPinnedPtr(const void* address) const override { return isPinned(address); }
  at::Device getDeviceFromPtr(void* address) const override {
    const Lock lock(program);
    const auto* found = blockAt(address);
    TORCH_CHECK(found != nullptr && found->second.stream != kHost, "late: not of a device");
    return deviceOf(found->second.stream);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    TORCH_CHECK(settings.hasGenerator, "late: it has no generator");
    TORCH_CHECK(device >= 0, "late: the generator of which device?");
    return defaultGenerator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<DeviceGenerator>(device < 0 ? getCurrentDevice() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resizeStorage(storage, nbytes);
  }
};

}  // namespace late
