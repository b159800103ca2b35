#include "paging/streams.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "memory/capturing.h"
#include "memory/events.h"

namespace ebb {

c10::Stream currentStream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void noteUse(const c10::Storage& storage, c10::Stream user) {
  if (storage) {
    const c10::impl::VirtualGuardImpl guard(user.device_type());
    guard.recordDataPtrOnStream(storage.data_ptr(), user);
  }
}

void noteUse(const c10::Storage& storage) {
  if (storage && !storage.device().is_cpu()) {
    noteUse(storage, currentStream(storage.device()));
  }
}

// A captured stream waits for nothing outside of the capture: see Note [Pages in a CUDA graph].
void takeOver(const c10::Storage& storage, c10::Stream made) {
  const c10::Stream user = currentStream(made.device());
  if (user == made) {
    return;
  }
  if (!isCapturing(made.device())) {
    recordEvent(made)->block(user);
  }
  noteUse(storage, user);
}

}  // namespace ebb
