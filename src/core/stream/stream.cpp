#include "stream/stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "memory/bytes.h"
#include "stream/capture.h"
#include "stream/event.h"

namespace ebb {

c10::Stream currentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

c10::Stream streamFromPool(c10::Device device, bool isHighPriority) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  return guard.getStreamFromGlobalPool(device, isHighPriority);
}

void orderAfter(c10::Stream later, c10::Stream earlier) {
  if (later != earlier) {
    recordEvent(earlier)->block(later);
  }
}

void noteUse(const c10::Storage& storage, c10::Stream user) {
  if (storage) {  // see Note [Memory of another storage]
    const c10::impl::VirtualGuardImpl guard(user.device_type());
    guard.recordDataPtrOnStream(ownerOf(storage).data_ptr(), user);
  }
}

void noteUse(const c10::Storage& storage) {
  if (storage && !storage.device().is_cpu()) {
    noteUse(storage, currentStream(storage.device()));
  }
}

// A captured stream does not wait for `maker`, since it may not wait for an event from outside of
// the capture: see Note [Pages in a CUDA graph].
void useOnCurrent(const c10::Storage& storage, c10::Stream maker) {
  const c10::Stream user = currentStream(maker.device());
  if (!isCapturing(user)) {
    orderAfter(user, maker);
  }
  noteUse(storage, user);
}

}  // namespace ebb
