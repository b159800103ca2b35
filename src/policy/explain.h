// Explains in words how a policy decides on an operator.
#pragma once

#include <cstdint>
#include <string>

#include "ebb/export.h"

namespace ebb {

class Policy;

// A line for each rule that may decide on calls of `op`, in order, with the rule's conditions.
// Throws c10::ValueError if there is no such operator.
EBB_API std::string explain(const Policy& policy, const std::string& op);

// Example: "rule 2, 'aten::mm', in modules that match '*.mlp'"; Verdict::kNoRule gives "default".
std::string ruleInWords(const Policy& policy, uint16_t rule);

}  // namespace ebb
