#include "hooks/slots.h"

#include <c10/util/Exception.h>

namespace ebb {

SlotNumber takeSlot() {
  static SlotNumber taken = 0;
  TORCH_INTERNAL_ASSERT(taken < kMostSlots, "a value has no free slot");
  return taken++;
}

}  // namespace ebb
