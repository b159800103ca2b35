// What the offload engine does to hardware: streams, events, copies, memory. Everything goes
// through this interface, so that tests can put a fake in its place that catches every missing
// order.
#pragma once

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <string>

#include "ebb/export.h"

namespace ebb {

// A point in a stream's work.
class Event {
 public:
  virtual ~Event() = default;

  // What went wrong with the work before it; empty if nothing did. Once it is done.
  virtual std::string error() const {
    return {};
  }
};
using EventPtr = std::shared_ptr<const Event>;

class Transfer {
 public:
  virtual ~Transfer() = default;

  // Whether what it calls the host is a file.
  virtual bool isDisk() const {
    return false;
  }

  // Whether bytes on `device` can leave it.
  virtual bool isDevice(c10::Device device) const = 0;

  // The stream on which this thread's ops run now. May be another one at each call.
  virtual c10::Stream computeStream(c10::Device device) = 0;

  // The streams of ours on which bytes leave the device and come back.
  virtual c10::Stream outStream(c10::Device device) = 0;
  virtual c10::Stream inStream(c10::Device device) = 0;

  // The end of what `stream` has been given so far.
  virtual EventPtr record(c10::Stream stream) = 0;

  // What `stream` is given from now on runs after `event`. The host does not wait.
  virtual void wait(c10::Stream stream, const EventPtr& event) = 0;

  virtual bool isDone(const Event& event) = 0;

  // The host waits for `event`.
  virtual void finish(const Event& event) = 0;

  // `storage` is about to be sent away: what computeStream() has been given makes its bytes.
  virtual void packed(const c10::Storage& storage) {
  }

  // Uninitialised bytes on `device`, that this thread's compute stream may use from now on.
  virtual c10::Storage allocateOnDevice(size_t nbytes, c10::Device device) = 0;

  // Uninitialised bytes of the host that copies can run from and to by themselves. Throws if there
  // are none.
  virtual c10::Storage allocateOnHost(size_t nbytes, c10::Device device) = 0;

  // `stream` uses memory on the device, which may be another's: when it is freed, nobody gets it
  // before what `stream` has been given by then.
  virtual void used(const c10::Storage& storage, c10::Stream stream) {
  }

  // Whether what `stream` is given is only written down, as a graph of the device's.
  virtual bool isCapturing(c10::Stream stream) {
    return false;
  }

  // Whether host memory may be used for something else.
  virtual bool isReusable(const c10::Storage& host) const {
    return true;
  }

  // Copies the first `nbytes` on `stream`, between a device and the host. Both storages must live
  // until an event behind the copy is done: the stream holds neither.
  virtual void copy(
      const c10::Storage& to, const c10::Storage& from, size_t nbytes, c10::Stream stream) = 0;
};

// Whether there is an accelerator now. From then on there is.
bool acceleratorIsThere();

Transfer& acceleratorTransfer();

// Where CPU tensors go that have no accelerator to leave: what it calls the host is the disk tier.
Transfer& diskTransfer();

}  // namespace ebb
