#include "residency/transfer.h"

#include <ATen/DeviceAccelerator.h>

namespace ebb {
namespace {

Transfer* instead = nullptr;

}  // namespace

Transfer& transfer() {
  static auto& usual =
      at::getAccelerator(false).has_value() ? acceleratorTransfer() : diskTransfer();
  return instead != nullptr ? *instead : usual;
}

void setTransfer(Transfer* given) {
  instead = given;
}

}  // namespace ebb
