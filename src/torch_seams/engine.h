// An autograd engine in front of torch's, which answers only the question for saved-tensor hooks.
#pragma once

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <memory>

namespace ebb {

// Returns the hooks for a tensor that the current thread saves; null: torch's own.
using MakeHooks = std::unique_ptr<torch::autograd::SavedVariableHooks> (*)();

// Puts ebb's engine in front of the default engine, unless already done. Called at every region
// entry: a Python interpreter loaded later brings an engine of its own.
void installEngine(MakeHooks hooks);

}  // namespace ebb
