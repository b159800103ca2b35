// Policy as Python holds it.
#pragma once

#include <memory>

#include "region/policy.h"

namespace ebb::bindings {

struct PyPolicy {
  std::shared_ptr<const Policy> policy;  // shared with the regions that use it
};

}  // namespace ebb::bindings
