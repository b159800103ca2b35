// Whether what runs now is only written down, as a graph of the device's.
#pragma once

#include <c10/core/Device.h>

namespace ebb {

// Whether a graph is being captured on this thread's stream of `device`.
bool isCapturing(c10::Device device);

}  // namespace ebb
