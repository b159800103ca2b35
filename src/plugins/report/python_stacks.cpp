#include "plugins/report/python_stacks.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/profiler/combined_traceback.h>

namespace ebb {

PythonStack pythonStack() {
  return torch::CapturedTraceback::gather(/*python=*/true, /*script=*/false, /*cpp=*/false);
}

Frames framesOf(const std::vector<PythonStack>& stacks) {
  std::vector<torch::CapturedTraceback*> captured;
  for (const PythonStack& stack : stacks) {
    captured.push_back(torch::getCapturedTracebackFromContext(stack));
  }
  const torch::SymbolizedTracebacks named = torch::symbolize(captured);
  std::unordered_map<const c10::GatheredContext*, std::vector<std::string>> found;
  for (size_t i = 0; i < stacks.size(); ++i) {
    std::vector<std::string>& frames = found[stacks[i].get()];
    for (const uint64_t place : named.tracebacks[i]) {
      const auto& [file, function, record] = named.all_frames[place];
      frames.push_back(c10::str(file, ":", record, " in ", function));
    }
  }
  return found;
}

}  // namespace ebb
