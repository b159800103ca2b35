// Globs over the names of operators and modules.
#pragma once

#include <string_view>

#include "ebb/export.h"

namespace ebb {

// Note [One dialect of globs]
// Patterns mean what they mean to Python's fnmatch.fnmatchcase, which the Python half uses: `*`,
// `?`, `[seq]`, `[a-z]` and `[!seq]` by code points, and everything else as it stands, a `[` that
// nothing closes and backslashes included. A table in tests/policy/test_globs.py is tried on both.
EBB_API bool globMatches(std::string_view pattern, std::string_view text);

// Whether `pattern` has anything but characters that stand for themselves.
bool isGlob(std::string_view pattern);

}  // namespace ebb
