#include "graph/streams.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "graph/value.h"
#include "stream/capture.h"
#include "stream/stream.h"

namespace ebb {
namespace {

// Streams are numbered from 1. A stream with this or a higher number has no bit in
// StreamsOfBytes::orderedOn, and so waits at each use.
constexpr size_t kBits = 8;

// All streams with this or a higher number share one value of StreamsOfBytes::madeOn: this number.
// A reader of bytes made on such a stream waits for all of these streams.
constexpr size_t kLastMaker = 32;

// Bytes of places with this number, which stands for all later ones too, may not be used again.
constexpr uint8_t kLastPlace = 3;

uint8_t bitOf(size_t place) { return place < kBits - 1 ? static_cast<uint8_t>(1U << place) : 0; }

}  // namespace

// Returns the index in all_ of the current stream; all_.size() if the device has no streams.
size_t GraphStreams::currentOf(c10::Device device) {
  if (!c10::impl::hasDeviceGuardImpl(device.type())) {
    return all_.size();
  }
  const c10::Stream current = currentStream(device);
  if (last_ >= all_.size() || all_[last_] != current) {
    last_ = add(current);
  }
  return last_;
}

[[gnu::noinline]] size_t GraphStreams::add(c10::Stream stream) {
  const auto place = std::find(all_.begin(), all_.end(), stream);
  if (place == all_.end()) {
    several_ |= std::any_of(all_.begin(), all_.end(), [&](c10::Stream other) {
      return other.device() == stream.device();
    });
    if (all_.empty()) {
      recordedIn_ = captureOf(stream.device());
    }
    all_.push_back(stream);
    return all_.size() - 1;
  }
  return place - all_.begin();
}

void GraphStreams::madeOffCpu(Value& value, c10::Device device) {
  const size_t current = currentOf(device);
  value.streams_.madeOn = static_cast<uint8_t>(std::min(current + 1, kLastMaker));
  // no stream is ordered after the new bytes yet
  value.streams_.orderedOn = 0;
  value.streams_.place = here_;
}

void GraphStreams::useOffCpu(Value& value, const c10::Storage& storage) {
  const size_t current = currentOf(storage.device());
  if (!several_ || current >= all_.size()) {
    return;
  }
  if ((value.streams_.orderedOn & bitOf(current)) == 0) {
    waitForMaker(value, current);
    value.streams_.orderedOn |= bitOf(current);
  }
  noteUse(storage, all_[current]);  // at each use: `storage` may differ from the last use
}

void GraphStreams::waitForMaker(const Value& value, size_t asker) {
  const size_t maker = value.streams_.madeOn;
  if (maker == kLastMaker) {  // the maker is stream kLastMaker or a later stream
    for (size_t i = kLastMaker - 1; i < all_.size(); ++i) {
      orderAfter(all_[asker], all_[i]);
    }
  } else if (maker != 0 && maker != asker + 1) {
    orderAfter(all_[asker], all_[maker - 1]);
  }
}

void GraphStreams::shareOffCpu(const c10::Storage& storage) {
  const size_t place = currentOf(storage.device());
  if (place >= all_.size()) {
    return;
  }
  const c10::Stream current = all_[place];
  for (const c10::Stream& other : all_) {
    if (other != current && other.device() == current.device()) {
      orderAfter(other, current);
      noteUse(storage, other);
    }
  }
}

void GraphStreams::findPlaceOffCpu() {
  uint64_t capture = 0;
  for (const c10::Stream& stream : all_) {
    capture = capture != 0 ? capture : captureOf(stream.device());
  }
  if (capture == recordedIn_) {
    here_ = 0;
    return;
  }
  const int backward = capture != 0 ? 0 : torch::autograd::get_current_graph_task_id();
  const Place now{capture, backward};
  if (others_ == 0 || now != other_ || backward == -1) {
    other_ = now;
    others_ = std::min<uint8_t>(others_, kLastPlace - 1) + 1;
  }
  here_ = others_;
}

bool GraphStreams::mayUseOffCpu(const Value& value) {
  const uint8_t place = value.streams_.place;
  if (place == 0) {
    return true;
  }
  findPlaceOffCpu();
  return place == here_ && place != kLastPlace;
}

}  // namespace ebb
