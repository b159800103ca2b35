// Policy as Python holds it.
#pragma once

#include <memory>

#include "policy/policy.h"

namespace ebb::bindings {

struct PyPolicy {
  PolicyPtr policy;  // shared with the regions that use it
};

}  // namespace ebb::bindings
