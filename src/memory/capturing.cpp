#include "memory/capturing.h"

#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ebb {

bool isCapturing(c10::Device device) {
  return !device.is_cpu() &&
         c10::impl::VirtualGuardImpl(device.type()).getStream(device).is_capturing();
}

}  // namespace ebb
