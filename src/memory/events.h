// Events that are used again.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>

#include "ebb/export.h"

namespace ebb {

// An event behind all that `stream` has been given. Making one takes as long as recording it, so
// those that nobody holds any more are used again.
EBB_API std::shared_ptr<const c10::Event> recordEvent(c10::Stream stream);

}  // namespace ebb
