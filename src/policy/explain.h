// What a policy does with an operator, in words.
#pragma once

#include <cstdint>
#include <string>

#include "ebb/export.h"

namespace ebb {

class Policy;

// A line for each rule that may decide on calls of `op`, in the order in which they are asked, with
// what must hold for it. Throws c10::ValueError if there is no such operator.
EBB_API std::string explain(const Policy& policy, const std::string& op);

// "rule 2, 'aten::mm', in a module '*.mlp'"; Verdict::kNoRule is "default".
std::string ruleInWords(const Policy& policy, uint16_t rule);

}  // namespace ebb
