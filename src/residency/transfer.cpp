#include "residency/transfer.h"

#include <ATen/DeviceAccelerator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ebb {
namespace {

Transfer* instead = nullptr;

// A build for an accelerator may run where there is none.
bool hasAccelerator() {
  const auto type = at::getAccelerator(false);
  return type.has_value() && c10::impl::VirtualGuardImpl(*type).deviceCount() > 0;
}

}  // namespace

Transfer& transfer() {
  static auto& usual = hasAccelerator() ? acceleratorTransfer() : diskTransfer();
  return instead != nullptr ? *instead : usual;
}

void setTransfer(Transfer* given) {
  instead = given;
}

}  // namespace ebb
