// Globs over the names of operators and modules.
#pragma once

#include <string_view>

#include "ebb/export.h"

namespace ebb {

// Note [One dialect of globs]
// Patterns mean the same as in Python's fnmatch.fnmatchcase, which the Python half uses. `*`, `?`,
// `[seq]`, `[a-z]` and `[!seq]` match code points. All other characters match themselves, including
// a `[` without a closing bracket, and backslashes. A table in tests/policy/test_globs.py is tried
// on both.
EBB_API bool globMatches(std::string_view pattern, std::string_view text);

// True if `pattern` has any special character.
bool isGlob(std::string_view pattern);

// `pattern` names an operator ("aten::mm": all overloads) or an overload, or is a glob over either.
bool operatorMatches(std::string_view pattern, std::string_view qualifiedName);

}  // namespace ebb
