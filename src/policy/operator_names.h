// Matching operator names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace ebb {

// `pattern` names an operator ("aten::mm": all overloads), an overload, or a glob over either.
bool operatorMatches(std::string_view pattern, std::string_view qualifiedName);

// The names among `names` that are most like `name`, best first.
std::vector<std::string> nearestNames(
    std::string_view name, const std::vector<std::string>& names, size_t count);

}  // namespace ebb
