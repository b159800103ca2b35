// The movers for each kind of device.
#pragma once

#include <c10/core/Device.h>

#include "ebb/export.h"
#include "plugins/paging/pool/mover.h"

namespace ebb {

// True if ebb has a mover for such devices, perhaps not in this build.
bool hasPageMover(c10::DeviceType type);

// Throws c10::NotImplementedError if there is no mover, or none in this build.
const PageMover& pageMoverOf(c10::Device device);

// Sets the mover of a backend out of tree, before anything is paged there. `mover` is never freed;
// null removes the mover.
EBB_API void setPageMover(c10::DeviceType type, const PageMover* mover);

}  // namespace ebb
