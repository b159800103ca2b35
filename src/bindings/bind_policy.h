// The Python class of policies.
#pragma once

#include <memory>

#include "policy/compiled_policy.h"

namespace ebb::bindings {

struct PyPolicy {
  PolicyPtr policy;  // shared with the regions that use the policy
};

}  // namespace ebb::bindings
