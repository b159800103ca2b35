// Tells torch's own autograd functions from others.
#pragma once

#include <torch/csrc/autograd/function.h>

#include "ebb/export.h"

namespace ebb {

// True if torch generates the class of `node`. Such a function unpacks each saved tensor once.
EBB_API bool isGenerated(const torch::autograd::Node& node);

}  // namespace ebb
