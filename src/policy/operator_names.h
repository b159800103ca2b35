// Matching operator names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ebb {

// `pattern` names an operator ("aten::mm": all overloads) or an overload, or is a glob over either.
bool operatorMatches(std::string_view pattern, std::string_view qualifiedName);

// The `count` names most like `name`, best first.
std::vector<std::string> nearestNames(
    std::string_view name, const std::vector<std::string>& names, size_t count);

}  // namespace ebb
