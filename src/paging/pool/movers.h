// The movers of pages that there are.
#pragma once

#include <c10/core/Device.h>

#include "ebb/export.h"
#include "paging/pool/mover.h"

namespace ebb {

// Whether pages can be on such devices. That says nothing of whether ebb was built for them.
bool hasPageMover(c10::DeviceType type);

// Throws c10::NotImplementedError if there is none, or ebb was built without it.
const PageMover& pageMoverOf(c10::Device device);

// For a backend out of tree; before anything is paged there. `mover` is never freed; null: none.
EBB_API void setPageMover(c10::DeviceType type, const PageMover* mover);

}  // namespace ebb
