// Registering the boxed function for the interception key.
#pragma once

namespace ebb {

// Installs interception at the first call and, at later ones, covers the operators that libraries
// have registered since. Called at every region entry: when nothing is new it costs one relaxed
// load. Throws if another library owns the dispatch key.
void installInterception();

}  // namespace ebb
