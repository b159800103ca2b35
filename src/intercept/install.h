// Registers the boxed function for the interception key.
#pragma once

#include <atomic>

namespace ebb {

// The first call installs interception. Later calls cover operators that libraries have registered
// since. Called at every region entry. Throws if another library owns the dispatch key.
void installInterception();

// True if a library has registered operators since the last installInterception(). Every op reads
// the flag, so the read is one relaxed load.
extern constinit std::atomic<bool> operatorsAreNew;

}  // namespace ebb
