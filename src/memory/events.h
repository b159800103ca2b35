// Reuse of events.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>

#include "ebb/export.h"

namespace ebb {

// An event after all work that `stream` has been given so far. Creating an event takes as long as
// recording it, so events are reused when no reference is left.
EBB_API std::shared_ptr<const c10::Event> recordEvent(c10::Stream stream);

}  // namespace ebb
