// Registering the boxed function for the interception key.
#pragma once

#include <atomic>

namespace ebb {

// Installs interception at the first call and, at later ones, covers the operators that libraries
// have registered since. Called at every region entry. Throws if another library owns the dispatch
// key.
void installInterception();

// Whether a library has registered operators since: asked at every op, so it is one relaxed load.
extern constinit std::atomic<bool> operatorsAreNew;

}  // namespace ebb
