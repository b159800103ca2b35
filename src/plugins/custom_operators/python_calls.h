// Calls of the plug-in into Python.
#pragma once

#include <cstddef>
#include <string>

#include "ebb/export.h"

namespace ebb {

struct CustomOperatorCalls {
  // True if a custom operator was registered with an effect.
  bool (*hasEffect)(const std::string& op);
  // Logs how many bytes of an operator's results a region holds, and how to free them.
  void (*tellKept)(const std::string& op, const std::string& region, size_t bytes);
};

// The bindings provide the functions; null in a program without Python.
EBB_API void setCustomOperatorCalls(const CustomOperatorCalls& given);
const CustomOperatorCalls* customOperatorCalls();

}  // namespace ebb
