#include "transfer/transfer.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

namespace ebb {
namespace {

// A build for an accelerator may run on a machine without a device.
bool hasAccelerator() {
  const auto type = at::getAccelerator(false);
  return type.has_value() && c10::impl::hasDeviceGuardImpl(*type) &&
         c10::impl::VirtualGuardImpl(*type).deviceCount() > 0;
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

}  // namespace ebb
