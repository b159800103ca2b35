// Functions of Python that the plug-in calls. The bindings set them; null in a program without
// Python.
#pragma once

#include <cstddef>
#include <string>

#include "ebb/export.h"

namespace ebb {

// True if a custom operator was registered with an effect.
EBB_API extern bool (*hasEffect)(const std::string& op);

// Logs how many bytes of an operator's results a region holds, and how to free them.
EBB_API extern void (*tellKept)(const std::string& op, const std::string& region, size_t bytes);

}  // namespace ebb
