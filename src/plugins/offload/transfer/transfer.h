// The offload engine's interface to hardware: streams, events, copies, memory. Only noteUse() and
// isCapturing() bypass this interface, so a fake implementation in tests detects every missing wait
// between streams.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <string>

#include "ebb/export.h"

namespace ebb {

// A point in a stream's work.
class TransferEvent {
 public:
  virtual ~TransferEvent() = default;

  virtual bool isDone() const = 0;

  // The host waits for the event.
  virtual void wait() const = 0;

  // The error of the work before a finished event; empty on success.
  virtual std::string error() const { return {}; }
};
using TransferEventPtr = std::shared_ptr<const TransferEvent>;

class Transfer {
 public:
  virtual ~Transfer() = default;

  // True if the "host" is a file.
  virtual bool isDisk() const { return false; }

  // True if storages on `device` can be offloaded.
  virtual bool isDevice(c10::Device device) const = 0;

  // The stream on which this thread's ops run now; may change between calls.
  virtual c10::Stream computeStream(c10::Device device) = 0;

  // ebb's own streams for copies from the device and to the device.
  virtual c10::Stream outStream(c10::Device device) = 0;
  virtual c10::Stream inStream(c10::Device device) = 0;

  // The end of all work given to `stream` so far.
  virtual TransferEventPtr record(c10::Stream stream) = 0;

  // Work given to `stream` from now on runs after `event`. The host does not wait.
  virtual void wait(c10::Stream stream, const TransferEventPtr& event) = 0;

  // `storage` is about to be offloaded; work given to computeStream() so far produces the bytes.
  virtual void packed(const c10::Storage& storage) {}

  // Uninitialised bytes on `device`, for use by this thread's compute stream from now on.
  virtual c10::Storage allocateOnDevice(size_t nbytes, c10::Device device) = 0;

  // Uninitialised host memory for asynchronous copies. Throws if none is available.
  virtual c10::Storage allocateOnHost(size_t nbytes, c10::Device device) = 0;

  // Copies the first `nbytes` on `stream`, between a device and the host. The stream holds neither
  // storage, so both must live until an event after the copy is done.
  virtual void copy(
      const c10::Storage& to, const c10::Storage& from, size_t nbytes, c10::Stream stream) = 0;
};

// True if an accelerator is available; once true, always true.
bool acceleratorIsThere();

std::shared_ptr<Transfer> acceleratorTransfer();

// Offloads CPU tensors where there is no accelerator; the "host" is the disk tier.
std::shared_ptr<Transfer> diskTransfer();

}  // namespace ebb
