// What a policy does with an operator, in words.
#pragma once

#include <string>

#include "ebb/export.h"

namespace ebb {

class Policy;

// A line for each rule that may decide on calls of `op`, in the order in which they are asked, with
// what must hold for it. Throws c10::ValueError if there is no such operator.
EBB_API std::string explain(const Policy& policy, const std::string& op);

}  // namespace ebb
