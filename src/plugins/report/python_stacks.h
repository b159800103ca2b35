// Python stacks at the calls of operators, for reports.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace ebb {

// torch's CapturedTraceback. framesOf() looks up the names of its frames.
using PythonStack = std::shared_ptr<c10::GatheredContext>;

// The Python stack of this thread. Takes the GIL.
PythonStack pythonStack();

// For each stack its frames, innermost first, such as "/src/model.py:12 in forward".
using Frames = std::unordered_map<const c10::GatheredContext*, std::vector<std::string>>;

// Takes the GIL.
Frames framesOf(const std::vector<PythonStack>& stacks);

}  // namespace ebb
