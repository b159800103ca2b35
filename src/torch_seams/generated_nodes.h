// Tells torch's own autograd functions from others.
#pragma once

#include <torch/csrc/autograd/function.h>

namespace ebb {

// True if torch generates the class of `node`. Such a function unpacks each saved tensor once.
bool isGenerated(const torch::autograd::Node& node);

}  // namespace ebb
